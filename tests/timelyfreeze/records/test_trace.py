"""Traces, read back as the trace event format asks viewers to read them."""

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.timelyfreeze.helpers.pipelines import BY_HAND, hand_order, random_bounds
from timelyfreeze.planning.plan import plan_from_ratios
from timelyfreeze.records.timeline import MEASURED, Block, Timeline, predicted_timelines
from timelyfreeze.records.trace import trace_to_json
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import ScheduleOrder, parse_action, parse_order
from timelyfreeze.settings.phases import Phase
from timelyfreeze.timing.bounds import uniform_bounds

Event = dict[str, Any]

# Keys that the format asks for, by phase of the event.
REQUIRED = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid"},
    "M": {"name", "ph", "pid", "tid", "args"},
    "s": {"name", "cat", "ph", "ts", "pid", "tid", "id"},
    "f": {"name", "cat", "ph", "ts", "pid", "tid", "id"},
}
METADATA = {
    "process_name": "name",
    "process_labels": "labels",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}
US = 1e-3 * 1.01  # a nanosecond, the step in which viewers count


def check_format(text: str) -> list[Event]:
    """Refuse what breaks a rule of the format, and return the events."""
    data = json.loads(text)
    assert data["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = data["traceEvents"]
    for event in events:
        assert set(event) >= REQUIRED[event["ph"]], event
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert set(event["args"]) == {METADATA[event["name"]]}
        assert event["ts"] >= 0
    check_slices([event for event in events if event["ph"] == "X"])
    check_flows(events)
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    return events


def by_thread(slices: list[Event]) -> dict[tuple[int, int], list[Event]]:
    threads: dict[tuple[int, int], list[Event]] = {}
    for event in slices:
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    return threads


def check_slices(slices: list[Event]) -> None:
    """Slices of a thread are nested or apart; ours have nothing to nest."""
    for thread in by_thread(slices).values():
        thread.sort(key=lambda event: (event["ts"], event["dur"]))
        for before, after in pairwise(thread):
            assert before["dur"] >= 0
            assert before["ts"] + before["dur"] <= after["ts"] + US / 10


def enclosing(events: list[Event], flow: Event) -> Event:
    """The slice that a viewer binds an end of a flow to: one that runs at its time."""
    found = [
        event
        for event in events
        if event["ph"] == "X"
        and (event["pid"], event["tid"]) == (flow["pid"], flow["tid"])
        and event["ts"] - US / 10 <= flow["ts"] < event["ts"] + event["dur"] - US / 10
    ]
    assert len(found) == 1, flow
    return found[0]


def check_flows(events: list[Event]) -> None:
    """Every flow has one start and one end, of one name and category, and goes forward in time."""
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(starts) == sum(e["ph"] == "s" for e in events)
    assert len(ends) == sum(e["ph"] == "f" for e in events)
    assert starts.keys() == ends.keys()
    for number, start in starts.items():
        end = ends[number]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        assert end["bp"] == "e", "binds to the slice around it and not to the next one"
        assert start["ts"] <= end["ts"]


def arrows(events: list[Event]) -> set[tuple[str, str]]:
    """Actions at both ends of each flow."""
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    return {
        (
            enclosing(events, starts[e["id"]])["args"]["action"],
            enclosing(events, e)["args"]["action"],
        )
        for e in events
        if e["ph"] == "f"
    }


def predicted(order: ScheduleOrder, seed: int) -> tuple[Timeline, Timeline]:
    dag = build_dag(order)
    bounds = random_bounds(dag, seed)
    ratios = 0.5 * (bounds.max_ms > bounds.min_ms)
    return predicted_timelines(dag, bounds, plan_from_ratios(dag, bounds, ratios))


def small() -> tuple[Timeline, Timeline]:
    """F takes 1 ms, B 2: 0F0 0F1 . . 0B0 . 0B1 above . 1F0 1B0 1F1 1B1."""
    dag = build_dag(parse_order(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]))
    bounds = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
    return predicted_timelines(dag, bounds, plan_from_ratios(dag, bounds, 0.5 * dag.freezable))


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("seed", range(5))
def test_traces_of_all_kinds_of_pipelines_keep_to_the_format(name: str, seed: int) -> None:
    """Random times round badly; some actions take none at all."""
    timelines = predicted(hand_order(name), seed)
    events = check_format(trace_to_json(timelines))
    actions = [e["args"]["action"] for e in events if e["ph"] == "X" and e["cat"] != "idle"]
    assert sorted(actions) == sorted(str(b.action) for t in timelines for b in t.blocks)
    arrows(events)


def test_the_small_trace_is_the_one_by_hand() -> None:
    events = check_format(trace_to_json(small()[:1]))
    slices = {e["args"].get("action"): e for e in events if e["ph"] == "X"}
    assert slices["1B1"] == {
        "ph": "X",
        "pid": 1,
        "tid": 0,
        "name": "B 1 critical",
        "ts": 5000.0,
        "dur": 2000.0,
        "cat": "backward,critical",
        "args": {
            "action": "1B1",
            "kind": "backward",
            "stage": 1,
            "microbatch": 1,
            "freeze_ratio": 0.0,
            "critical": True,
        },
    }
    assert (slices["0F1"]["name"], slices["0F1"]["cat"]) == ("F 1", "forward")
    assert arrows(events) == {("0F0", "1F0"), ("0F1", "1F1"), ("1B0", "0B0"), ("1B1", "0B1")}
    idle = [
        (e["pid"], e["ts"], e["dur"], e["args"]["until"]) for e in events if e.get("cat") == "idle"
    ]
    assert sorted(idle) == [
        (0, 2000.0, 2000.0, "0B0"),
        (0, 6000.0, 1000.0, "0B1"),
        (1, 0.0, 1000.0, "1F0"),
        (1, 7000.0, 2000.0, "the end of the batch"),
    ]


def test_what_a_batch_passes_by_has_no_slice() -> None:
    """Of stage 0, in front of the first live block, nothing ran: its rank is idle throughout."""
    blocks = tuple(
        replace(b, start_ms=0.0, end_ms=0.0) if b.action.stage == 0 else b
        for b in small()[0].blocks
    )
    timeline = Timeline(MEASURED, Phase.STABLE, blocks, 7, entry_stage=1)
    events = check_format(trace_to_json([timeline]))
    slices = [e for e in events if e["ph"] == "X" and e["cat"] != "idle"]
    assert sorted(e["args"]["action"] for e in slices) == ["1B0", "1B1", "1F0", "1F1"]
    idle = [(e["ts"], e["dur"]) for e in events if e.get("cat") == "idle" and e["pid"] == 0]
    assert idle == [(0.0, 7000.0)]
    assert arrows(events) == set()
    (name, _) = (e["args"]["name"] for e in events if e["name"] == "process_name")
    assert name == "rank 0, measured with nothing to freeze"


def test_every_rank_of_every_batch_is_a_process_with_a_name() -> None:
    events = check_format(trace_to_json(small()))
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {
        0: "rank 0, predicted without freezing",
        1: "rank 1, predicted without freezing",
        2: "rank 0, predicted with freezing",
        3: "rank 1, predicted with freezing",
    }
    threads = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert threads == {(pid, name) for pid in range(4) for name in ("actions", "idle")}
    ratios = {e["pid"]: e["args"]["freeze_ratio"] for e in events if e["name"].startswith("B 0")}
    assert ratios == {0: 0.0, 1: 0.0, 2: 0.5, 3: 0.5}


def test_clocks_that_do_not_agree_still_give_a_valid_trace() -> None:
    """1F0 seems to begin while 0F0 runs, or even before it."""
    for begins_ms in (0.5, -0.5):
        times = {
            "0F0": (1.0, 2.0), "0B0": (4.0, 5.0),
            "1F0": (1.0 + begins_ms, 2.5), "1B0": (2.5, 4.0),
        }  # fmt: skip
        blocks = tuple(
            Block(parse_action(text), int(text[0]), *interval) for text, interval in times.items()
        )
        events = check_format(trace_to_json([Timeline(MEASURED, Phase.STABLE, blocks)]))
        assert ("0F0", "1F0") in arrows(events)


def test_neighbours_that_round_apart_do_not_overlap() -> None:
    """2.5 ns rounds to 2, and the next number above it to 3."""
    half = 2.5e-6
    later = float(np.nextafter(half, 1.0))
    assert round(half * 1e6) < round(later * 1e6)
    blocks = (Block(parse_action("0F0"), 0, 0.0, later), Block(parse_action("0B0"), 0, half, 1.0))
    check_format(trace_to_json([Timeline(MEASURED, Phase.STABLE, blocks)]))


def test_no_timeline_is_an_empty_trace() -> None:
    assert check_format(trace_to_json([])) == []
