import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timelyfreeze.helpers.pipelines import hand_order, random_bounds, random_order
from timelyfreeze.planning.plan import FreezePlan, plan_from_json, plan_from_ratios, plan_to_json
from timelyfreeze.schedule.dag import PipelineDag, build_dag, makespan, start_times
from timelyfreeze.schedule.order import parse_action
from timelyfreeze.timing.bounds import DurationBounds, uniform_bounds


@pytest.fixture
def dag() -> PipelineDag:
    return build_dag(hand_order("two_by_two"))


@pytest.fixture
def bounds(dag: PipelineDag) -> DurationBounds:
    return uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))


def make_plan(dag: PipelineDag, bounds: DurationBounds, **ratios: float) -> FreezePlan:
    by_action = {parse_action(text[1:]): ratio for text, ratio in ratios.items()}
    return plan_from_ratios(dag, bounds, [by_action.get(a, 0.0) for a in dag.actions])


def test_plan_by_hand(dag: PipelineDag, bounds: DurationBounds) -> None:
    plan = make_plan(dag, bounds, a1B0=1.0, a0B1=0.25)
    #           0F0  0F1  0B0  0B1   1F0  1F1  1B0  1B1
    assert plan.durations_ms.tolist() == [1, 1, 2, 1.75, 1, 1, 1, 2]
    assert plan.start_ms.tolist() == [0, 1, 4, 6, 1, 2, 3, 4]
    assert (plan.batch_ms, plan.unfrozen_batch_ms, plan.frozen_batch_ms) == (7.75, 9.0, 6.0)
    assert plan.gain == pytest.approx(9.0 / 7.75 - 1.0)
    assert plan.upper_bound_gain == 0.5
    assert plan.stage_mean_ratios() == {0: 0.125, 1: 0.5}
    assert plan.ratio_of(parse_action("0B1")) == 0.25
    assert plan.ratio_of(parse_action("0F1")) == 0.0


def test_unknown_action(dag: PipelineDag, bounds: DurationBounds) -> None:
    with pytest.raises(ValueError, match="action 2B0 is not in the plan, which has 8 actions"):
        make_plan(dag, bounds).ratio_of(parse_action("2B0"))


def test_limit_is_infinite_if_freezing_leaves_nothing() -> None:
    dag = build_dag(hand_order("two_by_two"))
    bounds = uniform_bounds(dag, forward_ms=0.0, backward_ms=(0.0, 2.0))
    assert make_plan(dag, bounds).upper_bound_gain == math.inf


@given(st.integers(0, 10**6))
def test_ends_of_the_range_are_the_bounds_themselves(seed: int) -> None:
    dag = build_dag(random_order(seed))
    bounds = random_bounds(dag, seed)
    span = bounds.max_ms > bounds.min_ms
    none, everything = (plan_from_ratios(dag, bounds, r * span) for r in (0.0, 1.0))
    assert none.durations_ms.tolist() == bounds.max_ms.tolist()
    assert everything.durations_ms.tolist() == bounds.min_ms.tolist()
    assert none.batch_ms == none.unfrozen_batch_ms == makespan(dag, bounds.max_ms)
    assert everything.batch_ms == everything.frozen_batch_ms == makespan(dag, bounds.min_ms)


@pytest.mark.parametrize(
    ("ratios", "message"),
    [
        ([0.0] * 7, r"ratios have shape \(7,\); one is needed for each of the 8 actions"),
        ([0.0, 0.0, 1.1] + [0.0] * 5, "action 0B0 has freeze ratio 1.1"),
        ([0.0, 0.0, -0.1] + [0.0] * 5, "action 0B0 has freeze ratio -0.1"),
        ([0.0, 0.0, float("nan")] + [0.0] * 5, "action 0B0 has freeze ratio nan"),
        ([0.1] + [0.0] * 7, r"action 0F0 has freeze ratio 0.1.*here it saves 0.0 ms"),
    ],
)
def test_refuses_ratios(
    dag: PipelineDag, bounds: DurationBounds, ratios: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_from_ratios(dag, bounds, ratios)


@given(st.integers(0, 10**6))
def test_json_round_trip_is_exact(seed: int) -> None:
    dag = build_dag(random_order(seed))
    bounds = replace(random_bounds(dag, seed), outside_ms=seed / 7.0)
    ratios = np.random.default_rng(seed).random(len(dag.actions))
    plan = plan_from_ratios(dag, bounds, ratios * (bounds.max_ms > bounds.min_ms))
    again = plan_from_json(plan_to_json(plan))
    assert again.actions == plan.actions
    for name in ("ratios", "durations_ms", "start_ms"):
        assert getattr(again, name).tolist() == getattr(plan, name).tolist()
    for name in ("batch_ms", "unfrozen_batch_ms", "frozen_batch_ms", "outside_ms"):
        assert getattr(again, name) == getattr(plan, name)
    assert start_times(dag, again.durations_ms).tolist() == again.start_ms.tolist()


def test_json_has_one_line_per_action(dag: PipelineDag, bounds: DurationBounds) -> None:
    lines = [s.strip().rstrip(",") for s in plan_to_json(make_plan(dag, bounds)).splitlines()]
    assert '"0F1": {"ratio": 0.0, "duration_ms": 1.0, "start_ms": 1.0}' in lines
    assert '"unfrozen_batch_ms": 9.0' in lines


def test_time_to_a_loss_counts_what_is_beside_batches(
    dag: PipelineDag, bounds: DurationBounds
) -> None:
    """9 ms unfrozen."""
    plan = replace(make_plan(dag, bounds), steps_factor=1.1)
    assert plan.time_to_loss == pytest.approx(1.1 * plan.batch_ms / 9.0)
    beside = replace(plan, outside_ms=3.0)
    assert beside.time_to_loss == pytest.approx(1.1 * (plan.batch_ms + 3.0) / 12.0)
    assert replace(beside, steps_factor=None).time_to_loss is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"actions": {"0F0": 3}}'])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not the text of a freeze plan"):
        plan_from_json(text)


def test_arrays_cannot_be_changed(dag: PipelineDag, bounds: DurationBounds) -> None:
    plan = make_plan(dag, bounds)
    for each in (plan, plan_from_json(plan_to_json(plan))):
        for array in (each.ratios, each.durations_ms, each.start_ms):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1.0
