"""Activations are let go of with the backward of their microbatch."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.timelyfreeze.helpers.stages import (
    FULL,
    N_MICROBATCHES,
    SPLIT,
    Pipeline,
    make_modules,
    random_masks,
    uniform_masks,
)

pytestmark = pytest.mark.usefixtures("one_rank")


class Watched(nn.Module):
    """Notes each gradient that flows through it, and what its graph keeps alive."""

    def __init__(self) -> None:
        super().__init__()
        self.n_gradients = 0
        self.kept: list[weakref.ref[Tensor]] = []

    def forward(self, hidden: Tensor) -> Tensor:
        squared = hidden * hidden
        squared.register_hook(self._count)
        result = torch.sin(squared)  # its graph holds on to ``squared``
        holder = squared.detach().clone()
        result.grad_fn.metadata["holder"] = holder
        self.kept.append(weakref.ref(holder))
        return result * 1.0

    def _count(self, gradient: Tensor) -> None:
        self.n_gradients += 1


@pytest.fixture
def _no_gc() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_gc")
@pytest.mark.parametrize("schedule", [FULL, SPLIT])
def test_a_first_stage_frozen_whole_runs_no_backward_at_all(schedule: type) -> None:
    modules = make_modules()
    watched = Watched()
    modules[0] = nn.Sequential(modules[0], watched)
    pipeline = Pipeline(modules, schedule)
    pipeline.run()
    watched.n_gradients = 0
    pipeline.run({0: uniform_masks(modules, True)[0]})
    assert watched.n_gradients == 0
    assert all(each() is None for each in watched.kept), "the graph must be released"
    live_near_input = uniform_masks(modules, True)[0]
    live_near_input[2][0] = False
    pipeline.run({0: live_near_input})
    assert watched.n_gradients == 1


def alive_after_backwards(
    stage: Any, schedule: type, kept: list[weakref.ref[Tensor]]
) -> list[bool]:
    """Note, after each microbatch's last backward, whether what is kept of it is still there."""
    last = "backward_one_chunk" if schedule is FULL else "backward_weight_one_chunk"
    original, alive = getattr(stage, last), []

    def counting(microbatch: int, *args: Any, **kwargs: Any) -> None:
        original(microbatch, *args, **kwargs)
        alive.append(kept[microbatch]() is not None)

    setattr(stage, last, counting)
    return alive


@pytest.mark.usefixtures("_no_gc")
@pytest.mark.parametrize("schedule", [FULL, SPLIT])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_activations_are_released_with_the_backward_of_their_microbatch(
    schedule: type, ratio: float
) -> None:
    modules = make_modules()
    watched = Watched()
    modules[1] = nn.Sequential(modules[1], watched)
    pipeline = Pipeline(modules, schedule)
    pipeline.run()
    watched.kept.clear()
    alive = alive_after_backwards(pipeline.stages[1], schedule, watched.kept)
    pipeline.run({1: random_masks(modules, 0, ratio)[1]})
    assert alive == [False] * N_MICROBATCHES


@pytest.mark.usefixtures("_no_gc")
@pytest.mark.parametrize("schedule", [FULL, SPLIT])
def test_the_output_of_the_embedding_is_released_with_them(schedule: type) -> None:
    modules = make_modules()
    pipeline = Pipeline(modules, schedule, per_tensor=True)
    pipeline.run()
    kept: list[weakref.ref[Tensor]] = []
    embedding = next(part for part in modules[0].modules() if isinstance(part, nn.Embedding))
    embedding.register_forward_hook(lambda *args: kept.append(weakref.ref(args[-1])))
    alive = alive_after_backwards(pipeline.stages[0], schedule, kept)
    pipeline.run({0: random_masks(modules, 0, 0.5)[0]})
    assert alive == [False] * N_MICROBATCHES
