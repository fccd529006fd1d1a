"""Fronts of microbatches, by hand; plans that use them, played by a simulator that knows none."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timelyfreeze.helpers.pipelines import hand_order, random_bounds, random_order
from timelyfreeze.planning.plan import plan_from_ratios
from timelyfreeze.planning.skipped_grads import idle_ms, shortened, skip_depths, skipped_actions
from timelyfreeze.schedule.actions import ActionKind, parse_action
from timelyfreeze.schedule.dag import PipelineDag, build_dag, makespan
from timelyfreeze.schedule.order import parse_order
from timelyfreeze.schedule.schedules import gpipe_order, one_f_one_b_order
from timelyfreeze.timing.bounds import DurationBounds, uniform_bounds
from timelyfreeze.timing.p2p_costs import with_messages


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
    assert not idle_ms(dag, bounds).any()
    with_overhead = with_messages(dag, bounds, 0.25)
    waits = {str(a): ms for a, ms in zip(dag.actions, idle_ms(dag, with_overhead), strict=True)}
    assert waits == {"0F0": 0.0, "0B0": 0.25, "1F0": 0.25, "1B0": 0.0}


def test_bounds_with_skips_by_hand() -> None:
    dag = build_dag(parse_order(["0F0 0I0 0W0", "1F0 1I0 1W0"]))
    low = {"0F0": 3.0, "0I0": 0.5, "0W0": 0.25, "1F0": 3.0, "1I0": 4.0, "1W0": 1.0}
    high = {**low, "0W0": 5.0, "1W0": 6.0}
    bounds = DurationBounds(
        np.array([low[str(a)] for a in dag.actions]), np.array([high[str(a)] for a in dag.actions])
    )
    changed = shortened(dag, bounds, {0: 2})
    assert dict(zip(map(str, dag.actions), changed.min_ms.tolist(), strict=True)) == {
        **low,
        "1I0": 0.0,
        "1W0": 0.0,
    }
    # The input half has no ratio: it is gone, frozen or not. The weight half is, if frozen.
    assert dict(zip(map(str, dag.actions), changed.max_ms.tolist(), strict=True)) == {
        **high,
        "1I0": 0.0,
    }
    for depths in ({}, {0: 1}):
        same = shortened(dag, bounds, depths)
        assert np.array_equal(same.min_ms, bounds.min_ms)
        assert np.array_equal(same.max_ms, bounds.max_ms)


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
