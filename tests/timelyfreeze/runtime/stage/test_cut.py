"""Stages behind a frozen front: the chain of input gradients ends where nothing needs it.

Most cases freeze the first tensors of the model, in the order of its parameters. Each stage is told
in which microbatches nothing in front is live. The oracle is the plain chain of the same modules.
"""

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.timelyfreeze.helpers.fronts import expected_cut, freeze_front, run_cut
from tests.timelyfreeze.helpers.stages import (
    EVERY,
    FULL,
    N_MICROBATCHES,
    SINGLE,
    SPLIT,
    V_SHAPED,
    Checkpointed,
    Masks,
    Pipeline,
    assert_equal,
    by_schedule,
    expected,
    make_batch,
    make_modules,
    modules_for,
    random_masks,
    shard,
    uniform_masks,
    whole,
)

# Numbers of frozen tensors. The four stages of ``make_modules`` have 9, 6, 6 and 10; where there
# are two stages, they have 15 and 16.
FRONTS = {
    "in the first stage": 4,
    "the first stage": 9,
    "into the second stage": 12,
    "two stages": 15,
    "into the third stage": 19,
    "all but the last stage": 21,
    "into the last stage": 26,
    "all but one tensor": 30,
    "everything": 31,
}

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.slow]


# -- gradients -------------------------------------------------------------------------------------


def assert_shares(pipeline: Pipeline, masks: Masks) -> None:
    """What stages tell to have frozen are the shares of their elements."""
    for stage, module in zip(pipeline.stages, pipeline.modules, strict=True):
        sizes = np.array([p.numel() for p in module.parameters()])
        own = masks[stage.stage_index].items()
        wanted = {m: sizes[mask].sum() / sizes.sum() for m, mask in own}
        assert stage.applied_ratios == pytest.approx(wanted)


@pytest.mark.parametrize("schedule", EVERY)
def test_live_gradients_are_exact_behind_a_front_and_no_pass_leaves_a_trace_in_the_next(
    schedule: type,
) -> None:
    modules = modules_for(schedule)
    pipeline = Pipeline(modules, schedule)
    scattered, nothing = random_masks(modules, 8, 0.3), uniform_masks(modules, False)
    between = itertools.cycle([nothing, scattered])
    for n_frozen in (*FRONTS.values(), FRONTS["into the second stage"]):
        front = freeze_front(modules, n_frozen)
        for masks in (front, next(between)) if n_frozen % 2 else (front,):
            ran = run_cut(pipeline, masks)
            assert_equal(ran, expected_cut(modules, ran, masks))
            assert len(ran.sent) == (len(modules) - 1) * N_MICROBATCHES
            if masks is front:
                flat = [gradient for stage in ran.gradients for gradient in stage]
                assert [g is None for g in flat] == [i < n_frozen for i in range(len(flat))]
                assert_shares(pipeline, masks)
            for module in modules:
                module.zero_grad()
    ran = pipeline.run()
    assert_equal(ran, expected(modules, ran.executed))


@pytest.mark.parametrize("schedule", [FULL, SPLIT, *V_SHAPED])
@given(
    seed=st.integers(0, 10**6), n_frozen=st.integers(0, 31), ratio=st.sampled_from([0.0, 0.5, 0.9])
)
@by_schedule
def test_live_gradients_are_exact_with_more_frozen_behind_the_front(
    schedule: type, seed: int, n_frozen: int, ratio: float
) -> None:
    modules = modules_for(schedule, seed % 7)
    masks = freeze_front(modules, n_frozen)
    scattered = random_masks(modules, seed, ratio)
    for stage in masks:
        for microbatch in masks[stage]:
            masks[stage][microbatch] |= scattered[stage][microbatch]
    ran = run_cut(Pipeline(modules, schedule), masks)
    assert_equal(ran, expected_cut(modules, ran, masks))


@pytest.mark.parametrize("schedule", EVERY)
@given(
    seed=st.integers(0, 10**6),
    depths=st.lists(st.integers(0, 4), min_size=N_MICROBATCHES, max_size=N_MICROBATCHES),
    ratio=st.sampled_from([0.0, 0.5]),
)
@by_schedule
def test_live_gradients_are_exact_behind_fronts_of_different_depth(
    schedule: type, seed: int, depths: list[int], ratio: float
) -> None:
    modules = modules_for(schedule, seed % 7)
    masks = random_masks(modules, seed, ratio)
    for microbatch, depth in enumerate(depths):
        for stage in range(min(depth, len(modules))):
            masks[stage][microbatch][:] = True
    ran = run_cut(Pipeline(modules, schedule), masks)
    assert_equal(ran, expected_cut(modules, ran, masks))


@pytest.mark.parametrize("n_frozen", [4, 12, 15, 26])
@pytest.mark.parametrize("schedule", [FULL, SPLIT])
def test_gradients_add_over_passes(schedule: type, n_frozen: int) -> None:
    modules = make_modules()
    masks = freeze_front(modules, n_frozen)
    pipeline = Pipeline(modules, schedule)
    first = run_cut(pipeline, masks)
    both = run_cut(pipeline, masks)
    both.executed = first.executed + both.executed
    assert_equal(both, expected_cut(modules, both, masks))


@pytest.mark.parametrize("schedule", [FULL, SPLIT])
def test_gradients_stay_that_were_there_before_their_tensors_froze(schedule: type) -> None:
    modules = make_modules()
    pipeline = Pipeline(modules, schedule)
    wanted: list[Any] = [0.0] * 31
    for n_frozen in (0, 9, 12, 19):
        masks = freeze_front(modules, n_frozen)
        ran = run_cut(pipeline, masks)
        alone = [g for stage in expected(modules, ran.executed, masks).gradients for g in stage]
        wanted = [a if b is None else a + b for a, b in zip(wanted, alone, strict=True)]
    for got, want in zip([g for stage in ran.gradients for g in stage], wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("n_frozen", [4, 12, 15, 19])
def test_with_activation_checkpointing_live_gradients_are_exact(n_frozen: int) -> None:
    modules = make_modules()
    modules[1:3] = [Checkpointed(module) for module in modules[1:3]]
    masks = freeze_front(modules, n_frozen)
    ran = run_cut(Pipeline(modules, FULL), masks)
    assert_equal(ran, expected_cut(modules, ran, masks))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    ("schedule", "reshard_after_forward"), [(FULL, False), (FULL, True), (SPLIT, False)]
)
@pytest.mark.parametrize("n_frozen", [12, 15, 31])
def test_under_fsdp_live_gradients_are_exact(
    schedule: type, reshard_after_forward: bool, n_frozen: int
) -> None:
    modules = make_modules()
    plain = copy.deepcopy(modules)
    shard(modules, reshard_after_forward=reshard_after_forward)
    masks = freeze_front(modules, n_frozen)
    pipeline = Pipeline(modules, schedule)
    for each in (masks, uniform_masks(modules, False)):  # frozen from the first pass on, then live
        ran = run_cut(pipeline, each)
        ran.gradients = whole([[p.grad for p in module.parameters()] for module in modules])
        assert_equal(ran, expected_cut(plain, ran, each))
        for module in modules:
            module.zero_grad()


@pytest.mark.parametrize("n_frozen", [12, 15, 31])
@pytest.mark.parametrize("schedule", [FULL, SPLIT])
def test_torch_finds_in_order_what_stages_hand_to_each_other(schedule: type, n_frozen: int) -> None:
    """At this level torch compares every tensor between stages with what was agreed at first."""
    modules = make_modules()
    masks = freeze_front(modules, n_frozen)
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        ran = run_cut(Pipeline(modules, schedule), masks)
    finally:
        dist.set_debug_level(level)
    assert_equal(ran, expected_cut(modules, ran, masks))


# -- afterwards ------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [FULL, SPLIT])
def test_a_pass_that_nobody_announces_freezes_nothing(schedule: type) -> None:
    modules = make_modules()
    pipeline = Pipeline(modules, schedule)
    ran = run_cut(pipeline, freeze_front(modules, 31))
    tokens, labels = make_batch()
    pipeline.schedule.step(tokens, target=labels)
    ran.gradients = [[p.grad for p in module.parameters()] for module in modules]
    wanted = expected(modules, ran.executed).gradients
    assert all(all(map(torch.equal, *pair)) for pair in zip(ran.gradients, wanted, strict=True))


@pytest.mark.parametrize("n_frozen", [12, 31])
@pytest.mark.parametrize("schedule", SINGLE)  # torch evaluates no neighbours of one rank
def test_evaluation_is_as_always(schedule: type, n_frozen: int) -> None:
    modules = modules_for(schedule)
    masks = freeze_front(modules, n_frozen)
    pipeline = Pipeline(modules, schedule)
    run_cut(pipeline, masks)
    for module in modules:
        module.zero_grad()
    (stage,) = pipeline.stages
    stage.freeze(masks[0], without_input_grads=range(N_MICROBATCHES))
    tokens, labels = make_batch()
    losses: list[Tensor] = []
    with torch.no_grad():
        pipeline.schedule.eval(tokens, target=labels, losses=losses)
    assert all(map(torch.equal, losses, expected(modules, []).losses))
    assert stage.applied_ratios == {}
    ran = pipeline.run()
    assert_equal(ran, expected(modules, ran.executed))
