"""Times that have moved, by hand and over random schedules."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timelyfreeze.helpers.pipelines import random_bounds, random_order
from timelyfreeze.control.plans.replanning import drifts, forward_drift, largest_move, moved_bounds
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import ActionKind, parse_order
from timelyfreeze.timing.bounds import DurationBounds, uniform_bounds, validate_bounds
from timelyfreeze.timing.processors import with_messages

DAG = build_dag(parse_order(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]))
BOUNDS = uniform_bounds(DAG, forward_ms=4.0, backward_ms=(5.0, 10.0))
HALF = [7.5 if a.kind.freezable else 4.0 for a in DAG.actions]  # milliseconds, half frozen


def observed(**times: float) -> dict:
    return {a: times[f"{a.kind.value}{a.stage}"] for a in DAG.actions}


def test_each_stage_and_kind_moves_by_itself() -> None:
    found = drifts(DAG, BOUNDS, HALF, observed(F0=4.0, F1=5.0, B0=7.5, B1=6.0))
    assert found == {
        (0, ActionKind.FORWARD): 1.0,
        (1, ActionKind.FORWARD): 1.25,
        (0, ActionKind.FULL_BACKWARD): 1.0,
        (1, ActionKind.FULL_BACKWARD): 0.8,
    }
    assert largest_move(found) == pytest.approx(0.25)
    moved = moved_bounds(DAG, BOUNDS, found)
    place = DAG.index
    for action in DAG.actions:
        factor = found[action.stage, action.kind]
        assert moved.max_ms[place[action]] == BOUNDS.max_ms[place[action]] * factor
        assert moved.min_ms[place[action]] == BOUNDS.min_ms[place[action]] * factor


def test_forwards_behind_the_first_stage_say_how_slow_the_machine_is() -> None:
    found = drifts(DAG, BOUNDS, HALF, observed(F0=1.0, F1=5.0, B0=7.5, B1=6.0))
    assert forward_drift(found) == 1.25
    assert forward_drift({(0, ActionKind.FORWARD): 0.5}) == 0.5, "better than nothing"
    assert forward_drift({(1, ActionKind.FULL_BACKWARD): 3.0}) is None


def test_one_slow_microbatch_moves_nothing() -> None:
    dag = build_dag(parse_order(["0F0 0F1 0F2 0B0 0B1 0B2"]))
    bounds = uniform_bounds(dag, forward_ms=4.0, backward_ms=(5.0, 10.0))
    times = {a: 4.0 if a.kind is ActionKind.FORWARD else 10.0 for a in dag.actions}
    times[dag.actions[-1]] = 90.0
    assert largest_move(drifts(dag, bounds, bounds.max_ms, times)) == 0.0


def test_what_is_frozen_whole_and_takes_nothing_says_nothing() -> None:
    bounds = uniform_bounds(DAG, forward_ms=4.0, backward_ms=(0.0, 10.0))
    found = drifts(DAG, bounds, bounds.min_ms, observed(F0=5.0, F1=4.0, B0=0.2, B1=0.2))
    assert found == {(0, ActionKind.FORWARD): 1.25, (1, ActionKind.FORWARD): 1.0}
    assert largest_move({}) == 0.0
    moved = moved_bounds(DAG, bounds, found)
    longest = {str(a): moved.max_ms[i] for i, a in enumerate(DAG.actions)}
    assert (longest["0B0"], longest["1B0"]) == (12.5, 10.0), "they move as their stage's forwards"


def test_the_rest_of_a_backward_that_is_frozen_whole_has_no_say() -> None:
    """Seen on two cores: most backwards of the first stage are frozen whole and take 1 ms, or 3."""
    dag = build_dag(parse_order(["0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3"]))
    bounds = uniform_bounds(dag, forward_ms=50.0, backward_ms=(1.0, 100.0))
    frozen = ("0B0", "0B1", "0B2")
    planned = [1.0 if str(a) in frozen else bounds.max_ms[i] for i, a in enumerate(dag.actions)]
    times = {a: 3.0 if str(a) in frozen else 1.1 * planned[i] for i, a in enumerate(dag.actions)}
    found = drifts(dag, bounds, planned, times)
    assert found == {
        (0, ActionKind.FORWARD): pytest.approx(1.1),
        (0, ActionKind.FULL_BACKWARD): pytest.approx(1.1),
    }


def test_a_stage_of_which_all_is_frozen_whole_moves_with_its_forwards() -> None:
    bounds = uniform_bounds(DAG, forward_ms=4.0, backward_ms=(0.5, 10.0))
    found = drifts(DAG, bounds, bounds.min_ms, observed(F0=4.0, F1=5.0, B0=2.0, B1=2.0))
    assert found == {(0, ActionKind.FORWARD): 1.0, (1, ActionKind.FORWARD): 1.25}


def test_long_actions_have_more_weight_than_short_ones() -> None:
    dag = build_dag(parse_order(["0F0 0F1 0F2 0B0 0B1 0B2"]))
    bounds = uniform_bounds(dag, forward_ms=4.0, backward_ms=(20.0, 100.0))
    planned = [4.0, 4.0, 4.0, 20.0, 20.0, 100.0]
    times = dict(zip(dag.actions, [4.0, 4.0, 4.0, 30.0, 30.0, 100.0], strict=True))
    assert largest_move(drifts(dag, bounds, planned, times)) == 0.0
    times = dict(zip(dag.actions, [4.0, 4.0, 6.0, 20.0, 30.0, 100.0], strict=True))
    assert largest_move(drifts(dag, bounds, [4.0] * 3 + [20.0] * 3, times)) == pytest.approx(0.5)


@given(seed=st.integers(0, 10**6), overhead_ms=st.sampled_from([0.0, 0.7]))
def test_moved_bounds_explain_what_was_seen(seed: int, overhead_ms: float) -> None:
    """Messages keep their overhead: an action's own time is what was seen of it."""
    dag = build_dag(random_order(seed))
    plain = random_bounds(dag, seed)
    rng = np.random.default_rng(seed)
    ratios = rng.uniform(0.0, 1.0, len(dag.actions)) * (plain.max_ms > plain.min_ms)
    true = {(a.stage, a.kind): float(rng.uniform(0.5, 2.0)) for a in dag.actions}
    own_ms = plain.max_ms - ratios * (plain.max_ms - plain.min_ms)
    seen = {
        a: own_ms[i] * true[a.stage, a.kind]
        for i, a in enumerate(dag.actions)
        if own_ms[i] > 0.2 * plain.max_ms[i]  # what is left of the others tells nothing
    }
    bounds = with_messages(dag, plain, overhead_ms)

    def planned_ms(bounds: DurationBounds) -> np.ndarray:
        return bounds.max_ms - ratios * (bounds.max_ms - bounds.min_ms)

    moved = moved_bounds(dag, bounds, drifts(dag, bounds, planned_ms(bounds), seen))
    validate_bounds(dag, moved)
    again = drifts(dag, moved, planned_ms(moved), seen)
    assert largest_move(again) == pytest.approx(0.0, abs=1e-9)
