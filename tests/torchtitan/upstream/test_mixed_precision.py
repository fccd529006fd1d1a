"""Mixed precision under a pipeline without FSDP, beside what upstream does without our change."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchtitan.distributed.utils as titan_dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.components.optimizer import build_optimizers
from torchtitan.config import Optimizer

from torchtitan.settings.job_config import JobConfig
from torchtitan.upstream.fixes import autocast_stages, build_sgd, one_cast_for_all


@dataclass
class Dims:
    fsdp_enabled: bool = False
    tp_enabled: bool = False


def forward_dtype(dims: Dims, dtype: str) -> torch.dtype:
    config = JobConfig()
    config.training.mixed_precision_param = dtype
    part = nn.Linear(2, 2)
    autocast_stages([part], dims, config, torch.device("cpu"))
    return part(torch.ones(1, 2)).dtype


def test_stages_run_in_the_precision_that_was_asked_for() -> None:
    """Guards ``maybe_enable_amp``, which leaves a pipeline without FSDP in fp32, with a warning."""
    assert forward_dtype(Dims(), "bfloat16") == torch.bfloat16
    assert forward_dtype(Dims(), "float32") == torch.float32
    # There mixed precision is FSDP's business.
    assert forward_dtype(Dims(fsdp_enabled=True), "bfloat16") == torch.float32
    assert forward_dtype(Dims(tp_enabled=True), "bfloat16") == torch.bfloat16
    for tp_enabled in (False, True):
        pipeline = SimpleNamespace(fsdp_enabled=False, tp_enabled=tp_enabled, pp_enabled=True)
        with titan_dist.maybe_enable_amp(pipeline, "bfloat16", "cpu"):
            assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float32


def test_weights_and_gradients_stay_as_they_are_under_autocast() -> None:
    config = JobConfig()
    part = nn.Linear(2, 2)
    autocast_stages([part], Dims(), config, torch.device("cpu"))
    part(torch.ones(1, 2)).float().sum().backward()
    assert part.weight.dtype == part.weight.grad.dtype == torch.float32


class Casts(TorchDispatchMode):
    """Counts how often each shape is cast to bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16:
            self.shapes.append(tuple(out.shape))
        return out


def autocast_part() -> nn.Module:
    config = JobConfig()
    part = nn.Linear(2, 3, bias=False)
    autocast_stages([part], Dims(), config, torch.device("cpu"))
    return part


def test_a_weight_is_cast_once_for_all_microbatches() -> None:
    """Guards autocast's memory, which ends with the outermost of its contexts: a forward."""
    weight, batch = (3, 2), torch.ones(4, 2)
    part = autocast_part()
    with Casts() as alone:
        outputs = [part(batch) for _ in range(3)]
    assert alone.shapes.count(weight) == 3
    with Casts() as together, one_cast_for_all():
        outputs = [part(batch) for _ in range(3)]
        for output in outputs:  # as in a pipeline, one backward after the other
            output.float().sum().backward()
    assert together.shapes.count(weight) == 1
    assert torch.equal(part.weight.grad, torch.full(weight, 12.0))
    with torch.no_grad():
        part.weight.add_(1.0)
    with one_cast_for_all():  # what was cast for the last batch is forgotten
        moved = part(batch).float() - outputs[0].float()
    assert torch.allclose(moved, torch.full((4, 3), 2.0), atol=0.05)


def test_a_forward_without_gradient_leaves_no_cast_behind() -> None:
    part = autocast_part()
    with one_cast_for_all():
        with torch.no_grad():
            part(torch.ones(1, 2))
        part(torch.ones(1, 2)).float().sum().backward()
    assert torch.equal(part.weight.grad, torch.ones(3, 2))


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
