"""The library in a trainer of one's own, all stages in one process."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from tests.timelyfreeze.helpers.stages import (
    EVERY,
    FULL,
    N_MICROBATCHES,
    SINGLE,
    Ran,
    assert_equal,
    expected,
    make_batch,
    modules_for,
    process_group,
    sum_loss,
)
from timelyfreeze import TimelyFreeze
from timelyfreeze.runtime import FreezingStage, greet_other_ranks_alone, stages_of
from timelyfreeze.schedule import Action
from timelyfreeze.settings import Phase

SHORT = {"warmup": 1, "monitor": 7, "ramp": 9, "discard_batches": 1, "min_gain": -1.0}


@pytest.fixture(autouse=True)
def _one_process() -> Any:
    with process_group():
        yield


def plain_schedule(modules: list[nn.Module], kind: type = FULL, **options: Any) -> Any:
    stages = [
        PipelineStage(module, i, len(modules), torch.device("cpu"))
        for i, module in enumerate(modules)
    ]
    greet_other_ranks_alone(stages)
    options = {"loss_fn": sum_loss, "scale_grads": False, **options}
    is_single = kind in SINGLE
    return kind(stages[0] if is_single else stages, N_MICROBATCHES, **options)


class Loop:
    """A trainer as a user writes it, which keeps what the masks were."""

    def __init__(self, kind: type = FULL, *, lr: float = 0.1, **arguments: Any) -> None:
        self.modules = modules_for(kind)
        self.schedule = plain_schedule(self.modules, kind)
        parameters = [p for module in self.modules for p in module.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=lr)
        self.plans: list[Any] = []
        self.freezer = TimelyFreeze(
            self.schedule,
            **{**SHORT, "on_plan": lambda plan, bounds: self.plans.append(plan), **arguments},
        )
        self.masks: dict[int, dict[int, np.ndarray]] = {}
        self.executed: list[Action] = []
        for stage in stages_of(self.schedule):
            stage.freeze = self._noting(stage)

    def _noting(self, stage: FreezingStage) -> Callable[..., None]:
        def freeze(masks: Any, **kwargs: Any) -> None:
            self.masks[stage.stage_index] = {m: mask.copy() for m, mask in masks.items()}
            FreezingStage.freeze(stage, masks, **kwargs)

        return freeze

    def train(self, first: int, last: int, *, batches: int = 1) -> list[Any]:
        seen = []
        for t in range(first, last + 1):
            losses: list[Any] = []
            with self.freezer.step(t):
                for n in range(batches):
                    tokens, labels = make_batch(10 * t + n)
                    self.schedule.step(tokens, target=labels, losses=losses)
            seen.append([[p.grad for p in m.parameters()] for m in self.modules])
            self.optimizer.step()
            self.optimizer.zero_grad()
        return seen

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for module in self.modules for p in module.parameters()]


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
def test_gradients_are_those_of_the_masked_reference_under_every_schedule(kind: type) -> None:
    loop = Loop(kind, lr=0.0, skip_input_grads="off")
    recorder = loop.freezer._controller._recorder
    phases = set()
    for t in range(1, 12):
        batch = make_batch(10 * t)
        (found,) = loop.train(t, t)
        phases.add(loop.freezer.phase)
        unread = recorder._finished[-1]
        order = [action for action, _, _ in unread]
        wanted = expected(loop.modules, order, loop.masks, batch)
        assert_equal(Ran(found, wanted.losses, wanted.sent), wanted)
    assert phases == {Phase.WARMUP, Phase.UPPER_BOUND, Phase.LOWER_BOUND, Phase.RAMP, Phase.STABLE}
    assert loop.freezer.plan is loop.plans[0]
    assert len(loop.plans) == 1
    assert loop.freezer.bounds is not None
