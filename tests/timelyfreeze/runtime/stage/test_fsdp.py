"""Stages under FSDP2 and real torch schedules, all on one rank."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from tests.timelyfreeze.helpers.stages import (
    FULL,
    N_MICROBATCHES,
    SPLIT,
    Pipeline,
    assert_equal,
    by_schedule,
    expected,
    make_modules,
    random_masks,
    shard,
    whole,
)

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.slow]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    ("schedule", "reshard_after_forward"), [(FULL, False), (FULL, True), (SPLIT, False)]
)
@pytest.mark.parametrize("ratio", [0.3, 0.8, 1.0])
def test_under_fsdp_gradients_are_the_unmasked_ones_times_the_mask(
    schedule: type, reshard_after_forward: bool, ratio: float
) -> None:
    modules = make_modules()
    plain = copy.deepcopy(modules)
    shard(modules, reshard_after_forward=reshard_after_forward)
    masks = random_masks(modules, 7, ratio)
    ran = Pipeline(modules, schedule).run(masks)
    ran.gradients = whole([[p.grad for p in module.parameters()] for module in modules])
    assert_equal(ran, expected(plain, ran.executed, masks))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("schedule", [FULL, SPLIT])
def test_gradients_are_reduced_beside_the_actions_of_a_batch(
    schedule: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = make_modules()
    shard(modules)
    pipeline, beside, reduced = Pipeline(modules, schedule), [], []
    pipeline.run()  # torch infers shapes first, by backwards of its own

    @contextmanager
    def counted() -> Iterator[None]:
        beside.append(True)
        yield
        beside.pop()

    reduce = FSDPParamGroup.post_backward

    def noted(group: FSDPParamGroup, *args: Any) -> None:
        if group.reduce_grads:
            reduced.append(bool(beside))
        reduce(group, *args)

    pipeline.recorder.beside_actions = counted
    monkeypatch.setattr(FSDPParamGroup, "post_backward", noted)
    pipeline.run()
    assert reduced
    assert all(reduced)


def gradients(schedule: type, masks: Any = None) -> list[list[Tensor | None]]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    modules = make_modules()
    shard(modules, reshard_after_forward=False, mp_policy=policy)
    Pipeline(modules, schedule).run(masks)
    return whole([[p.grad for p in module.parameters()] for module in modules])


unmasked = cache(gradients)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("schedule", [FULL, SPLIT])
@given(seed=st.integers(0, 10**6))
@by_schedule
def test_under_fsdp_in_bfloat16_live_gradients_are_those_of_a_run_without_masks(
    schedule: type, seed: int
) -> None:
    masks = random_masks(make_modules(), seed, 0.4)
    # The same tensors in all microbatches, then single ones frozen in the first or the last one.
    same = {s: dict.fromkeys(range(N_MICROBATCHES), masks[s][0]) for s in masks}
    for masked, free in zip(gradients(schedule, same), unmasked(schedule), strict=True):
        assert all(a is None or torch.equal(a, b) for a, b in zip(masked, free, strict=True))
    for masked, frozen in zip(gradients(schedule, masks), masks.values(), strict=True):
        never = np.logical_and.reduce(list(frozen.values()))
        assert [g is None for g in masked] == never.tolist()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_torch_still_loses_gradients_where_fsdp_reshards_within_a_split_backward() -> None:
    """Guards torch itself, without masks: only full backwards survive resharding after forward.

    When this fails, the check of ``parallelism.fsdp_reshard_after_forward`` can go.
    """
    modules = make_modules()
    plain = copy.deepcopy(modules)
    shard(modules, reshard_after_forward=True)
    ran = Pipeline(modules, SPLIT).run()
    wanted = expected(plain, ran.executed)
    got = whole([[p.grad for p in module.parameters()] for module in modules])
    assert not all(map(torch.equal, got[1], wanted.gradients[1]))
