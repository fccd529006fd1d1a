"""SGD with momentum in upstream's container."""

import pytest
import torch
from torch import nn
from torchtitan.components.optimizer import build_optimizers
from torchtitan.config import Optimizer

from torchtitan.upstream.fixes import build_sgd

CONFIG = Optimizer(name="SGD", lr=0.1, beta1=0.5, weight_decay=0.2, implementation="foreach")


def test_upstream_still_has_no_sgd() -> None:
    """Fails when it has; then ours has to go."""
    with pytest.raises(NotImplementedError, match="SGD"):
        build_optimizers([nn.Linear(2, 2)], CONFIG, None)  # type: ignore[arg-type]


def test_steps_are_those_of_the_definition() -> None:
    part = nn.Linear(1, 1, bias=False)
    nn.init.constant_(part.weight, 1.0)
    optimizers = build_sgd([part], CONFIG, None)
    weight, velocity = 1.0, 0.0
    for gradient in (0.4, -1.0, 0.3):
        part.weight.grad = torch.full((1, 1), gradient)
        optimizers.step()
        velocity = 0.5 * velocity + gradient + 0.2 * weight
        weight -= 0.1 * velocity
        assert part.weight.item() == pytest.approx(weight)


def test_a_state_that_is_saved_before_the_first_step_changes_nothing() -> None:
    """Torch fills it with a step of zero gradients, which has weight decay."""
    weights = []
    for is_saved in (False, True):
        part = nn.Linear(1, 1, bias=False)
        nn.init.constant_(part.weight, 1.0)
        optimizers = build_sgd([part], CONFIG)
        if is_saved:
            assert optimizers.state_dict()["state.weight.momentum_buffer"].item() == 0.0
        for gradient in (0.4, -1.0):
            part.weight.grad = torch.full((1, 1), gradient)
            optimizers.step()
        weights.append(part.weight.item())
    assert weights[0] == weights[1]
