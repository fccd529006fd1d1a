"""Times of stages from bounds and back, worked out by hand."""

from dataclasses import astuple

import numpy as np
import pytest

from tests.timelyfreeze.helpers.pipelines import hand_order
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import Action, ActionKind, parse_action
from timelyfreeze.timing.bounds import validate_bounds
from timelyfreeze.whatif.times import (
    Pair,
    StageTimes,
    bounds_from_times,
    complete_times,
    median_pairs,
)

F, B, I, W = ActionKind  # noqa: E741
FULL = {F: (3.0, 3.0), B: (2.0, 5.0)}
SPLIT = {F: (3.0, 3.0), I: (2.0, 2.0), W: (0.5, 4.0)}


def pairs(rows: dict[str, Pair]) -> dict[Action, Pair]:
    return {parse_action(text): pair for text, pair in rows.items()}


def test_the_halves_of_a_full_backward() -> None:
    times = complete_times(FULL, is_first=False)
    # I runs what a frozen backward runs; W what freezing can leave out.
    assert times == StageTimes(3.0, 5.0, 2.0, input_ms=2.0, weight_ms=3.0, frozen_weight_ms=0.0)


def test_the_first_stage_does_its_whole_backward_in_the_weight_half() -> None:
    times = complete_times({F: (3.0, 3.0), B: (0.0, 5.0)}, is_first=True)
    assert times == StageTimes(3.0, 5.0, 0.0, input_ms=0.0, weight_ms=5.0, frozen_weight_ms=0.0)
    kept = complete_times({F: (3.0, 3.0), B: (2.0, 5.0)}, is_first=True)
    assert (kept.input_ms, kept.weight_ms, kept.frozen_weight_ms) == (0.0, 5.0, 2.0)


def test_a_full_backward_is_both_halves() -> None:
    times = complete_times(SPLIT, is_first=False)
    assert times == StageTimes(3.0, 6.0, 2.5, input_ms=2.0, weight_ms=4.0, frozen_weight_ms=0.5)


def test_what_was_measured_both_ways_stays() -> None:
    times = complete_times({**SPLIT, B: (2.25, 5.5)}, is_first=False)
    assert times == StageTimes(3.0, 5.5, 2.25, input_ms=2.0, weight_ms=4.0, frozen_weight_ms=0.5)


def test_medians_over_microbatches() -> None:
    bounds = pairs(
        {
            "0F0": (1.0, 1.0), "0F1": (9.0, 9.0), "0F2": (2.0, 2.0),
            "1F0": (50.0, 50.0), "0B0": (1.0, 4.0), "0B1": (3.0, 3.0), "0B2": (2.0, 8.0),
        }
    )  # fmt: skip
    assert median_pairs(bounds, 0) == {F: (2.0, 2.0), B: (2.0, 4.0)}
    assert median_pairs(bounds, 1) == {F: (50.0, 50.0)}


@pytest.mark.parametrize("name", ["two_by_two", "zero_bubble", "v_shape"])
def test_every_action_gets_the_times_of_its_stage(name: str) -> None:
    dag = build_dag(hand_order(name))
    stages = [
        StageTimes(10.0 + s, 8.0 + s, 4.0 + s, 3.0 + s, 5.0 + s, 1.0 + s)
        for s in range(dag.n_stages)
    ]
    bounds = bounds_from_times(dag, stages)
    validate_bounds(dag, bounds)
    by_kind = {F: (10.0, 10.0), B: (4.0, 8.0), I: (3.0, 3.0), W: (1.0, 5.0)}
    for action, low, high in zip(dag.actions, bounds.min_ms, bounds.max_ms, strict=True):
        assert (low - action.stage, high - action.stage) == by_kind[action.kind], action


def test_times_that_cannot_be_are_told() -> None:
    assert StageTimes(1.0, 2.0, 1.0, 1.0, 1.0, 0.0).errors() == []
    assert StageTimes(1.0, 2.0, 3.0).errors() == ["B would take 3 ms frozen and 2 ms unfrozen"]
    assert StageTimes(-0.5).errors() == ["forward_ms would be -0.5"]


def test_sums_and_fractions() -> None:
    a, b = StageTimes(1.0, 2.0, 3.0, 4.0, 5.0, 6.0), StageTimes(0.5, 0.5, 0.5, 0.5, 0.5, 0.5)
    assert np.allclose(astuple(a.plus(b, -2)), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert astuple(a.over(2)) == (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
