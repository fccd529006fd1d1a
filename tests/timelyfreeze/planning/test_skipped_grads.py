"""Fronts of microbatches, by hand; plans that use them, played by a simulator that knows none."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timelyfreeze.helpers.pipelines import hand_order, random_bounds, random_order
from tests.timelyfreeze.helpers.programs import noisy_bounds, scheduled
from timelyfreeze.planning.lp import solve_freeze_ratios
from timelyfreeze.planning.plan import (
    FreezePlan,
    plan_from_ratios,
    skip_depths,
    skipped_actions,
)
from timelyfreeze.schedule.dag import PipelineDag, build_dag, makespan, start_times
from timelyfreeze.schedule.order import (
    ActionKind,
    gpipe_order,
    one_f_one_b_order,
    parse_action,
    parse_order,
)
from timelyfreeze.timing.bounds import DurationBounds, uniform_bounds
from timelyfreeze.timing.processors import with_messages


def ratios_of(dag: PipelineDag, *frozen: str, half: str = "") -> np.ndarray:
    ratios = np.zeros(len(dag.actions))
    ratios[[dag.index[parse_action(text)] for text in frozen]] = 1.0
    if half:
        ratios[dag.index[parse_action(half)]] = 0.5
    return ratios


def test_a_front_ends_at_the_first_stage_that_is_not_frozen_whole() -> None:
    dag = build_dag(gpipe_order(3, 4))
    frozen = ["0B0", "1B0", "2B0", "0B1", "2B1", "1B2", "2B2", "0B3"]
    ratios = ratios_of(dag, *frozen, half="1B3")
    assert skip_depths(dag, ratios) == {0: 3, 1: 1, 3: 1}
    assert skip_depths(dag, np.zeros(len(dag.actions))) == {}


def test_halves_of_a_split_backward_are_idle_together() -> None:
    dag = build_dag(parse_order(["0F0 0I0 0W0", "1F0 1I0 1W0", "2F0 2I0 2W0"]))
    depths = skip_depths(dag, ratios_of(dag, "0W0", "1W0"))
    idle = [
        str(a)
        for a, is_idle in zip(dag.actions, skipped_actions(dag, depths), strict=True)
        if is_idle
    ]
    assert idle == ["1I0", "1W0"]


def test_an_idle_action_still_waits_for_its_message() -> None:
    dag = build_dag(gpipe_order(2, 1))
    bounds = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
    assert not bounds.lead_ms(dag).any()
    with_overhead = with_messages(dag, bounds, 0.25)
    waits = {str(a): ms for a, ms in zip(dag.actions, with_overhead.lead_ms(dag), strict=True)}
    assert waits == {"0F0": 0.0, "0B0": 0.25, "1F0": 0.25, "1B0": 0.0}


def test_a_plan_with_skips_by_hand() -> None:
    """Two stages, two microbatches: 1 ms forwards; backwards of 2 ms, 1 of it input gradients."""
    dag = build_dag(one_f_one_b_order(2, 2))
    bounds = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
    ratios = ratios_of(dag, "0B0", "1B0")
    # Rank 1: F0 from 1 to 2, B0 to 3 (or in no time), F1 to 4 (3), B1 to 6 (5); then 0B1 to 8 (7).
    assert plan_from_ratios(dag, bounds, ratios).batch_ms == 8.0
    plan = plan_from_ratios(dag, bounds, ratios, skips_grads=True)
    assert plan.batch_ms == 7.0
    assert plan.durations_ms[dag.index[parse_action("1B0")]] == 0.0
    assert plan.durations_ms[dag.index[parse_action("0B0")]] == 1.0, "as its bounds say"
    # With everything frozen rank 0 still takes what its bounds say: F 1, 1, then B 1, 1.
    assert plan.frozen_batch_ms == 4.0
    assert plan.unfrozen_batch_ms == plan_from_ratios(dag, bounds, ratios).unfrozen_batch_ms


@given(
    seed=st.integers(0, 10**6),
    depths=st.lists(st.integers(0, 5), min_size=8, max_size=8),
)
def test_skips_make_nothing_longer(seed: int, depths: list[int]) -> None:
    dag = build_dag(random_order(seed))
    bounds = random_bounds(dag, seed)
    span = bounds.max_ms > bounds.min_ms
    ratios = np.array(
        [
            float(a.kind.freezable and can and a.stage < depths[a.microbatch % len(depths)])
            for a, can in zip(dag.actions, span, strict=True)
        ]
    )
    plain = plan_from_ratios(dag, bounds, ratios)
    plan = plan_from_ratios(dag, bounds, ratios, skips_grads=True)
    assert np.array_equal(plan.ratios, plain.ratios)
    assert plan.batch_ms <= plain.batch_ms
    # An oracle of its own: backwards behind frozen stages, action by action.
    frozen = {(a.stage, a.microbatch) for a, r in zip(dag.actions, ratios, strict=True) if r}
    durations = [
        0.0
        if a.kind is not ActionKind.FORWARD
        and a.stage > 0
        and all((stage, a.microbatch) in frozen for stage in range(a.stage + 1))
        else float(ms)
        for a, ms in zip(dag.actions, plain.durations_ms, strict=True)
    ]
    assert plan.batch_ms == pytest.approx(makespan(dag, durations))


def test_hand_order_is_v_shaped() -> None:
    """Stages of a rank may be both skipped and behind that."""
    dag = build_dag(hand_order("v_shape"))
    last = dag.n_stages - 1
    everything = dag.freezable.astype(float)
    depths = skip_depths(dag, everything)
    assert set(depths.values()) == {last + 1}
    idle = skipped_actions(dag, depths)
    kinds = {a.kind for a, i in zip(dag.actions, idle, strict=True) if i}
    assert ActionKind.FORWARD not in kinds
    assert {a.stage for a, i in zip(dag.actions, idle, strict=True) if i} == set(range(1, last + 1))


def solve(dag: PipelineDag, bounds: DurationBounds, cap: float, *, skips: bool) -> FreezePlan:
    return solve_freeze_ratios(
        dag, bounds, max_freeze_ratio=cap, whole_stages=(0,), skips_grads=skips
    )


@pytest.mark.parametrize("cap", [0.0, 0.4, 0.8])
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_a_plan_keeps_its_budgets_and_its_word(name: str, cap: float) -> None:
    dag = scheduled(name, 2, 6)
    bounds = noisy_bounds(dag, 3)
    plans = {skips: solve(dag, bounds, cap, skips=skips) for skips in (False, True)}
    assert plans[True].batch_ms <= plans[False].batch_ms
    for skips, plan in plans.items():
        assert max(plan.stage_mean_ratios().values()) <= cap + 1e-9
        first = plan.ratios[dag.freezable & (dag.stages == 0)]
        assert set(first.tolist()) <= {0.0, 1.0}
        durations = (1.0 - plan.ratios) * bounds.max_ms + plan.ratios * bounds.min_ms
        if skips:
            durations[skipped_actions(dag, skip_depths(dag, plan.ratios))] = 0.0
        assert plan.batch_ms == pytest.approx(
            float(np.max(start_times(dag, durations) + durations))
        )
    # What is left out anyway is counted; ratios stay.
    assert np.array_equal(plans[True].ratios, plans[False].ratios)


def test_messages_are_still_waited_for() -> None:
    for n_ranks, waits in ((2, {1: 0.0}), (3, {1: 0.5, 2: 0.0})):
        dag = build_dag(one_f_one_b_order(n_ranks, 4))
        bounds = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
        ratios = dag.freezable.astype(float)
        plan = plan_from_ratios(dag, with_messages(dag, bounds, 0.5), ratios, skips_grads=True)
        idle = skipped_actions(dag, skip_depths(dag, plan.ratios))
        # The last stage receives no gradients.
        for stage, wait_ms in waits.items():
            assert set(plan.durations_ms[idle & (dag.stages == stage)].tolist()) == {wait_ms}


def test_a_pinned_backward_ends_every_skip() -> None:
    dag = build_dag(one_f_one_b_order(3, 3))
    bounds = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
    low = np.where((dag.stages == 1) & dag.freezable, bounds.max_ms, bounds.min_ms)
    plan = solve(dag, DurationBounds(low, bounds.max_ms), 1.0, skips=True)
    assert set(skip_depths(dag, plan.ratios).values()) <= {1}
    assert not plan.ratios[dag.stages == 1].any()
