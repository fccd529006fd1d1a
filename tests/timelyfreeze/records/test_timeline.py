"""Timelines of pipelines small enough to be drawn on paper."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.timelyfreeze.helpers.pipelines import BY_HAND, critical_path, hand_order
from timelyfreeze.planning.plan import plan_from_ratios
from timelyfreeze.records.timeline import (
    MEASURED,
    PREDICTED,
    Block,
    Timeline,
    predicted_timelines,
    timeline_from_json,
    timeline_to_json,
)
from timelyfreeze.schedule.dag import build_dag, critical_positions
from timelyfreeze.schedule.order import one_f_one_b_order, parse_action, parse_order
from timelyfreeze.settings.phases import Phase
from timelyfreeze.timing.bounds import DurationBounds, uniform_bounds

TWO = parse_order(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])


def interval(timeline: Timeline, action: str) -> tuple[float, float]:
    (block,) = [b for b in timeline.blocks if str(b.action) == action]
    return block.start_ms, block.end_ms


def critical(timeline: Timeline) -> set[str]:
    return {str(block.action) for block in timeline.blocks if block.is_critical}


def unfrozen_and_planned() -> tuple[Timeline, Timeline]:
    """F takes 1, B 2 or 1: a half of each backward of stage 1 is frozen."""
    dag = build_dag(TWO)
    bounds = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
    ratios = [0.5 if str(a) in ("1B0", "1B1") else 0.0 for a in dag.actions]
    return predicted_timelines(dag, bounds, plan_from_ratios(dag, bounds, ratios))


def test_the_batch_without_freezing_is_the_one_drawn_by_hand() -> None:
    """0F0 0F1 . . 0B0 . 0B1 above 1F0 1B0 1F1 1B1: 9 ms."""
    timeline, _ = unfrozen_and_planned()
    assert (timeline.origin, timeline.phase, timeline.step) == (
        PREDICTED, Phase.UPPER_BOUND, None,
    )  # fmt: skip
    expected = {
        "0F0": (0, 1), "0F1": (1, 2), "0B0": (4, 6), "0B1": (7, 9),
        "1F0": (1, 2), "1B0": (2, 4), "1F1": (4, 5), "1B1": (5, 7),
    }  # fmt: skip
    assert {str(b.action): (b.start_ms, b.end_ms) for b in timeline.blocks} == expected
    assert timeline.batch_ms == 9.0
    assert timeline.rank_bubbles == pytest.approx((3 / 9, 3 / 9))
    assert timeline.bubble == pytest.approx(3 / 9)
    assert critical(timeline) == {"0F0", "1F0", "1B0", "1F1", "1B1", "0B1"}
    assert {b.freeze_ratio for b in timeline.blocks} == {0.0}


def test_the_batch_under_a_plan_is_shorter_by_what_it_freezes() -> None:
    """1B0 and 1B1 take 1.5 ms, so the batch takes 8."""
    _, timeline = unfrozen_and_planned()
    assert timeline.phase is Phase.STABLE
    assert timeline.batch_ms == 8.0
    assert interval(timeline, "1B1") == (4.5, 6.0)
    ratios = {str(b.action): b.freeze_ratio for b in timeline.blocks if b.freeze_ratio}
    assert ratios == {"1B0": 0.5, "1B1": 0.5}


def test_messages_take_their_time_between_ranks() -> None:
    dag = build_dag(TWO)
    bounds = replace(
        uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0)), p2p_latency_ms={(0, 1): 0.25}
    )
    plan = plan_from_ratios(dag, bounds, np.zeros(len(dag.actions)))
    timeline, _ = predicted_timelines(dag, bounds, plan)
    assert interval(timeline, "1F0") == (1.25, 2.25)
    assert timeline.batch_ms == plan.batch_ms == 9.25


def test_ranks_that_fraction_a_processor_are_slowed_down() -> None:
    """One processor, and 12 ms of work: 0F1 and 1F0 share it, and both end at 3 instead of 2."""
    dag = build_dag(TWO)
    bounds = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
    plan = plan_from_ratios(dag, bounds, np.zeros(len(dag.actions)), n_processors=1.0)
    timeline, _ = predicted_timelines(dag, bounds, plan, n_processors=1.0)
    assert interval(timeline, "0F1") == interval(timeline, "1F0") == (1.0, 3.0)
    assert timeline.batch_ms == plan.unfrozen_batch_ms == 12.0
    assert critical(timeline) >= {"0F0", "1B1", "0B1"}


def test_a_plan_of_another_pipeline_is_refused() -> None:
    dag, other = build_dag(TWO), build_dag(one_f_one_b_order(2, 3))
    bounds = uniform_bounds(other, forward_ms=1.0, backward_ms=(1.0, 2.0))
    plan = plan_from_ratios(other, bounds, np.zeros(len(other.actions)))
    with pytest.raises(ValueError, match="plan's 12 actions and the schedule's 8"):
        predicted_timelines(dag, bounds, plan)


@pytest.mark.parametrize("name", BY_HAND)
def test_the_critical_path_lasts_the_whole_batch(name: str) -> None:
    dag = build_dag(hand_order(name))
    rng = np.random.default_rng(3)
    slow = rng.uniform(1.0, 5.0, len(dag.actions))
    bounds = DurationBounds(slow, slow)
    plan = plan_from_ratios(dag, bounds, np.zeros(len(dag.actions)))
    timeline, _ = predicted_timelines(dag, bounds, plan)
    path = critical_path(dag, slow)
    assert critical(timeline) == set(map(str, path))
    on_path = [b.duration_ms for b in timeline.blocks if b.is_critical]
    assert sum(on_path) == pytest.approx(timeline.batch_ms)


def test_what_arrived_last_was_waited_for_and_not_what_ended_last() -> None:
    """0F1 ends 2 ms before 1B0, but its message is 3 ms on the way to 1F1."""
    dag = build_dag(TWO)
    ends = {"0F0": 1, "0F1": 2, "0B0": 6, "0B1": 9, "1F0": 2, "1B0": 4, "1F1": 6, "1B1": 8}
    late = (dag.index[parse_action("0F1")], dag.index[parse_action("1F1")])
    delays = [3.0 if tuple(edge) == late else 0.0 for edge in dag.edges.tolist()]
    path = critical_positions(dag, [ends[str(a)] for a in dag.actions], delays)
    assert [str(dag.actions[i]) for i in path] == ["0F0", "0F1", "1F1", "1B1", "0B1"]


def test_text_brings_back_every_bit() -> None:
    unfrozen, planned = unfrozen_and_planned()
    for timeline in (unfrozen, planned, replace(unfrozen, phase=Phase.OFF, step=7, entry_stage=1)):
        text = timeline_to_json(timeline)
        assert timeline_from_json(text) == timeline
        assert json.loads(text)["batch_ms"] == timeline.batch_ms
    earlier = json.loads(timeline_to_json(unfrozen))
    del earlier["entry_stage"]
    assert timeline_from_json(json.dumps(earlier)) == unfrozen, "of a version without entries"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("step"), "not the text of a timeline"),
        (lambda d: d.update(origin="guessed"), "origin is 'guessed'"),
        (lambda d: d["actions"].pop("1B1"), "1I1 is missing"),
        (
            lambda d: d["actions"]["0F0"].update(end_ms=-1.0),
            "0F0.end_ms is -1.0; it must be 0 or",
        ),
        (lambda d: d["actions"]["0F0"].update(start_ms=9.0), "0F0 runs from 9.0 to 1.0 ms"),
        (lambda d: d.update(entry_stage=2), "entry_stage is 2; the stages are 0 to 1"),
        (lambda d: d["actions"]["1F0"].update(rank=0), "stage lives on|sorted by rank"),
    ],
)
def test_text_that_is_no_timeline_is_refused(change, message) -> None:  # type: ignore[no-untyped-def]
    data = json.loads(timeline_to_json(unfrozen_and_planned()[0]))
    change(data)
    with pytest.raises(ValueError, match=message):
        timeline_from_json(json.dumps(data))


def test_words_do_not_speak_of_freezing_where_nothing_is_frozen() -> None:
    unfrozen, planned = unfrozen_and_planned()
    assert (unfrozen.words, planned.words) == ("without freezing", "with freezing")
    assert replace(unfrozen, phase=Phase.STABLE).words == "with nothing to freeze"
    entered = replace(planned, entry_stage=1)
    assert entered.words == "with freezing, front computed before"
    assert [str(b.action) for b in entered.ran] == ["1F0", "1B0", "1F1", "1B1"], "as far as it ran"
    assert planned.ran == planned.blocks


def test_a_batch_without_time_has_no_bubble() -> None:
    blocks = tuple(Block(parse_action(text), 0, 0.0, 0.0) for text in ("0F0", "0B0"))
    assert Timeline(MEASURED, Phase.OFF, blocks).bubble == 0.0
