"""Timelines as trace files for ui.perfetto.dev and chrome://tracing.

The format is the JSON of "Trace Event Format" (Google, 2016), read by Perfetto: complete events
("X") with a start and a duration in microseconds, metadata ("M") with names of processes and
threads, and flow events ("s" and "f") drawn as arrows. A rank is a process with two threads: its
actions, and its waits. Several timelines have separate processes, so batches lie below each other
on a common time axis.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from timelyfreeze.records.timeline import KIND_WORDS, Timeline

Event = dict[str, Any]
Slices = list[tuple[int, int]]  # start and end of each block in whole nanoseconds

_ACTIONS_THREAD, _IDLE_THREAD = 0, 1
# Part of a slice's name, by which viewers colour and search.
_CRITICAL = " critical"
# Times are rounded to these before anything else, so that neighbours touch and never overlap.
_NS_PER_MS = 1e6
_NS_PER_US = 1e3


def trace_to_json(timelines: Sequence[Timeline]) -> str:
    """Write timelines, from top to bottom, as a trace, an event a line."""
    lines = ",\n".join(json.dumps(event) for event in trace_events(timelines))
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


def trace_events(timelines: Sequence[Timeline]) -> list[Event]:
    """Return the events of a trace: names of processes and threads first, the rest by time.

    Rank r of the n-th timeline has process number r plus the ranks of earlier timelines.
    """
    names: list[Event] = []
    events: list[Event] = []
    first_pid, numbers = 0, count()
    for timeline in timelines:
        names += _names(timeline, first_pid)
        slices = _slices(timeline)
        events += _actions(timeline, slices, first_pid)
        events += _idle_times(timeline, slices, first_pid)
        events += _arrows(timeline, slices, first_pid, numbers)
        first_pid += timeline.n_ranks
    return names + sorted(events, key=lambda event: event["ts"])


def _slices(timeline: Timeline) -> Slices:
    """Return the slices of a timeline; none reaches into the next."""
    slices: Slices = []
    for lane in timeline.lanes:
        starts = [round(block.start_ms * _NS_PER_MS) for block in lane]
        ends = [round(block.end_ms * _NS_PER_MS) for block in lane]
        slices += zip(starts, map(min, ends, [*starts[1:], ends[-1]]), strict=True)
    return slices


def _names(timeline: Timeline, first_pid: int) -> Iterator[Event]:
    for rank, fraction in enumerate(timeline.rank_bubbles):
        pid = first_pid + rank
        yield _name(pid, "process_name", name=f"rank {rank}, {timeline.origin} {timeline.words}")
        yield _name(pid, "process_labels", labels=f"{100 * fraction:.1f}% idle")
        yield _name(pid, "process_sort_index", sort_index=pid)
        for tid, name in ((_ACTIONS_THREAD, "actions"), (_IDLE_THREAD, "idle")):
            yield {**_name(pid, "thread_name", name=name), "tid": tid}
            yield {**_name(pid, "thread_sort_index", sort_index=tid), "tid": tid}


def _name(pid: int, name: str, /, **arguments: Any) -> Event:
    return {"ph": "M", "pid": pid, "tid": _ACTIONS_THREAD, "ts": 0, "name": name, "args": arguments}


def _slice(pid: int, tid: int, name: str, start_ns: int, end_ns: int, **more: Any) -> Event:
    times = {"ts": start_ns / _NS_PER_US, "dur": (end_ns - start_ns) / _NS_PER_US}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, **times, **more}


def _actions(timeline: Timeline, slices: Slices, first_pid: int) -> Iterator[Event]:
    for block, span in zip(timeline.blocks, slices, strict=True):
        action, kind = block.action, KIND_WORDS[block.action.kind]
        if timeline.is_passed(action):
            continue
        name, category = f"{action.kind.value} {action.microbatch}", kind
        if block.is_critical:
            name, category = f"{name}{_CRITICAL}", f"{kind},critical"
        about = {
            "action": str(action),
            "kind": kind,
            "stage": action.stage,
            "microbatch": action.microbatch,
            "freeze_ratio": block.freeze_ratio,
            "critical": block.is_critical,
        }
        pid = first_pid + block.rank
        yield _slice(pid, _ACTIONS_THREAD, name, *span, cat=category, args=about)


def _idle_times(timeline: Timeline, slices: Slices, first_pid: int) -> Iterator[Event]:
    """Yield a rank's idle times from the batch's start to its end."""
    last = max(end for _, end in slices)
    free_since = [0] * timeline.n_ranks
    for block, (start, end) in zip(timeline.blocks, slices, strict=True):
        since, free_since[block.rank] = free_since[block.rank], end
        if start > since:
            yield _idle(first_pid + block.rank, since, start, str(block.action))
    for rank, since in enumerate(free_since):
        if last > since:
            yield _idle(first_pid + rank, since, last, "the end of the batch")


def _idle(pid: int, start_ns: int, end_ns: int, until: str) -> Event:
    return _slice(pid, _IDLE_THREAD, "idle", start_ns, end_ns, cat="idle", args={"until": until})


def _arrows(
    timeline: Timeline, slices: Slices, first_pid: int, numbers: Iterator[int]
) -> Iterator[Event]:
    """Yield an arrow, from within a slice, per dependency between ranks with a delay."""
    for i, j in timeline.edges:
        before, after = timeline.blocks[i], timeline.blocks[j]
        (began, ended), (begins, ends) = slices[i], slices[j]
        if before.rank == after.rank or ended == began or ends == begins:
            continue
        number = next(numbers)
        both = {"cat": "dependency", "name": "waits for", "id": number, "tid": _ACTIONS_THREAD}
        # A pass whose clocks could not be brought together may have arrived before it was sent.
        leaves = max(began, min(ended - 1, begins))
        arrives = max(begins, min(leaves, ends - 1))
        sent = {"ph": "s", "pid": first_pid + before.rank, "ts": leaves / _NS_PER_US}
        received = {"ph": "f", "bp": "e", "pid": first_pid + after.rank, "ts": arrives / _NS_PER_US}
        yield {**sent, **both}
        yield {**received, **both}
