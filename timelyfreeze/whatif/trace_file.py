"""Traces of PyTorch's profiler, one of each pipeline rank, as a bounds file.

Schedules of torch that run lists of actions annotate each action: ``PP:2F0`` is the forward of
microbatch 0 in stage 2. An annotation begins with the wait for a message, and of a GPU it says when
kernels were launched, not when they ran. An action therefore takes from the first to the end of the
last operation called within its annotation: kernels, else operations of its thread, and where a
trace has neither, the annotation's own time. GPU annotations ("gpu_user_annotation") are not used:
they lack kernels of backwards, launched by another thread (github.com/pytorch/kineto/issues/1022).
"""

from __future__ import annotations

import re
import statistics
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.files import MOST, listed, shown
from timelyfreeze.files.long_list import has_list, items_of
from timelyfreeze.schedule import Action, ActionKind, ScheduleError, build_order
from timelyfreeze.timing import parse_bounds
from timelyfreeze.whatif.bounds_file import BoundsFile, PipelineMetadata
from timelyfreeze.whatif.times import Pair

_EVENTS = "traceEvents"
_ACTION = re.compile(r"PP:(\d+[FBIW]\d+)")
_SENDING = re.compile(r"PP:(\d{1,9})SEND_F\d+")
_US_PER_MS = 1e3
# Part of a full backward that gradients of weights take: 0.39 to 0.41 in the middle stages of
# profiles/tiny_8m_1F1B. Of linear layers alone it is half; attention itself has no weights.
WEIGHT_SHARE = 0.4
_HOW = (
    "torch annotates actions, as PP:2F0, under Interleaved1F1B, ZBVZeroBubble and others that run "
    "lists of actions, not under GPipe and 1F1B: record some steps with "
    "ScheduleInterleaved1F1B([stage], ...), which one stage on each rank is enough for; a trainer "
    'with schedules of its own runs each action in record_function("PP:<stage><F|B><microbatch>")'
)

_Thread = tuple[str, str]  # process and thread
is_trace = partial(has_list, key=_EVENTS)  # whether a file seems to be a trace


class _Annotation(NamedTuple):
    """An annotation of an action; microseconds."""

    begin: float
    end: float
    action: Action
    thread: _Thread


def _floats() -> array[float]:
    return array("d")


@dataclass
class _Events:
    """What counts of a trace's events; microseconds, in flat arrays."""

    annotations: list[_Annotation] = field(default_factory=list)
    sending: set[int] = field(default_factory=set)  # stages that send their output on
    # Begin and end of operations.
    operations: dict[_Thread, array[float]] = field(default_factory=partial(defaultdict, _floats))
    launches: array[float] = field(default_factory=_floats)  # correlation, moment
    kernels: array[float] = field(default_factory=_floats)  # correlation, begin, end
    is_of_gpu: bool = False  # whether the trainer ran on a GPU

    def add(self, event: Any) -> None:
        """Add an event if it has a duration and counts."""
        if not isinstance(event, dict):
            raise ValueError(f"{_EVENTS} holds {shown(event)}; events are objects")
        name, category = event.get("name"), event.get("cat")
        if event.get("ph") != "X" or not isinstance(name, str):
            return
        thread = str(event.get("pid")), str(event.get("tid"))
        if category == "kernel" and not name.startswith("nccl"):
            self.kernels.extend((_correlation(event), *_span(event)))
        elif category in ("cuda_runtime", "cuda_driver") and "aunch" in name:
            self.launches.extend((_correlation(event), _span(event)[0]))
        elif category == "cpu_op":
            self.operations[thread].extend(_span(event))
        elif category == "gpu_user_annotation" or name.startswith("nccl:"):
            self.is_of_gpu = True
        elif match := _ACTION.fullmatch(name):
            action = Action.parse(match[1])
            self.annotations.append(_Annotation(*_span(event), action, thread))
        elif match := _SENDING.fullmatch(name):
            self.sending.add(int(match[1]))

    def check(self) -> None:
        """Sort the annotations; refuse a trace that does not tell what its actions took."""
        notes = self.annotations
        if not notes:
            raise ValueError(f"no action is annotated; {_HOW}")
        notes.sort()
        threads = {note.thread for note in notes}
        if len(threads) > 1 or any(a.end > b.begin for a, b in pairwise(notes)):
            raise ValueError(
                "annotated actions overlap or are of several threads; a trace must be of one rank, "
                "which runs an action at a time"
            )
        if (self.is_of_gpu or self.kernels) and not (self.kernels and self.launches):
            raise ValueError(
                "it is of a GPU, yet lacks kernels or their launches; record it with "
                "ProfilerActivity.CPU and ProfilerActivity.CUDA"
            )

    def spans_ms(self) -> NDArray[np.float64]:
        """Return begin and end of what ran in each annotation, shape [N, 2]; NaN for nothing."""
        notes = np.array([note[:2] for note in self.annotations])
        operations = self.operations[self.annotations[0].thread]
        if self.kernels:
            launches = np.array(self.launches).reshape(-1, 2)
            launches = launches[launches[:, 0].argsort()]
            kernels = np.array(self.kernels).reshape(-1, 3)
            places = launches[:, 0].searchsorted(kernels[:, 0]).clip(max=len(launches) - 1)
            known = launches[places, 0] == kernels[:, 0]
            called, ran = launches[places[known], 1], kernels[known, 1:]
        elif operations:
            ran = np.array(operations).reshape(-1, 2)
            called = ran[:, 0]
        else:
            return notes / _US_PER_MS
        places = notes[:, 0].searchsorted(called, side="right") - 1
        inside = (places >= 0) & (called <= notes[places, 1])
        found = np.full((2, len(notes)), np.nan)
        np.fmin.at(found[0], places[inside], ran[inside, 0])
        np.fmax.at(found[1], places[inside], ran[inside, 1])
        return found.T / _US_PER_MS


def _span(event: Mapping[str, Any]) -> tuple[float, float]:
    times: list[Any] = [event.get("ts"), event.get("dur")]
    if all(type(value) in (int, float) and 0 <= value <= MOST for value in times):
        return float(times[0]), float(sum(times))
    raise ValueError(f"ts and dur of {shown(event['name'])} must be microseconds, 0 or more")


def _correlation(event: Mapping[str, Any]) -> float:
    arguments = event.get("args")
    value = arguments.get("correlation") if isinstance(arguments, dict) else None
    if type(value) is int and abs(value) <= MOST:
        return float(value)
    raise ValueError(f"args.correlation of {shown(event['name'])} must be a whole number")


@dataclass(frozen=True)
class _Rank:
    """What a trace tells of a pipeline rank."""

    path: Path
    row: tuple[Action, ...]  # actions of a batch, in the order of execution
    samples: Mapping[Action, Sequence[float]]  # durations, milliseconds
    batches_ms: Sequence[float]  # of each batch, from its first operation to its last
    sending: set[int]  # stages that send their output on


def _read(path: Path) -> _Rank:
    events = _Events()
    try:
        for event in items_of(path, _EVENTS):
            events.add(event)
        events.check()
        return _rank(path, events)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _rank(path: Path, events: _Events) -> _Rank:
    actions, spans = [note.action for note in events.annotations], events.spans_ms()
    n = len(set(actions))
    batches = [slice(i, i + n) for i in range(0, len(actions), n)]
    if any(len(set(actions[batch])) < n for batch in batches):
        raise ValueError(
            f"the {len(actions)} annotated actions, {n} different ones, are no whole batches; "
            "record whole steps of training alone, without validation"
        )
    samples: dict[Action, list[float]] = defaultdict(list)
    for action, took in zip(actions, np.nan_to_num(spans[:, 1] - spans[:, 0]), strict=True):
        samples[action].append(float(took))
    for action, took_ms in samples.items():
        if action.kind is ActionKind.FORWARD and not any(took_ms):
            raise ValueError(f"no operation ran within PP:{action}; annotate the forward itself")
    took_ms = [float(np.nanmax(spans[b, 1]) - np.nanmin(spans[b, 0])) for b in batches]
    return _Rank(path, tuple(actions[:n]), samples, took_ms, events.sending)


def read_trace_files(paths: Sequence[Path], weight_share: float = WEIGHT_SHARE) -> BoundsFile:
    """Read the traces of the ranks of a pipeline, in any order, as a bounds file.

    ``weight_share`` is the part of a full backward that freezing saves; all of it in stage 0.

    Raises:
        ValueError: Naming the file, what is missing, and how to record it.
    """
    ranks = sorted(map(_read, paths), key=lambda rank: min(action.stage for action in rank.row))
    name = f"{ranks[0].path}" + (f" and {len(ranks) - 1} more" if len(ranks) > 1 else "")
    try:
        order = build_order([rank.row for rank in ranks])
        last = order.n_stages - 1
        if any(last in rank.sending for rank in ranks):
            raise ScheduleError(f"stage {last} sends its output on, and no stage {last + 1} exists")
    except ScheduleError as error:
        found = (f"{r.path.name} stages {sorted({a.stage for a in r.row})}" for r in ranks)
        raise ValueError(
            f"{str(error).partition(' (a schedule')[0]}; plan takes a trace of each rank of one "
            f"pipeline, with whole batches; these have: {listed(found)}"
        ) from None
    samples = {action: took for rank in ranks for action, took in rank.samples.items()}
    pairs = dict(_pairs(samples, weight_share))
    bounds = {
        str(action): dict(zip(("min_ms", "max_ms"), pairs[action.stage, action.kind], strict=True))
        for action in samples
    }
    batches_ms = max((rank.batches_ms for rank in ranks), key=statistics.median)
    notes = [
        f"in the trace itself a batch takes {statistics.median(batches_ms):.1f} ms, the median of "
        f"{len(batches_ms)}; more than from its actions are messages and gaps between actions"
    ]
    if any(action.kind is ActionKind.FULL_BACKWARD for action in samples):
        notes.append(
            f"a trace does not tell what freezing saves of a full backward: {weight_share:.0%} are "
            "taken for gradients of weights (--weight-share; a profile of a small Llama has 39 to "
            "41%, linear layers alone 50%), and in stage 0 all"
        )
    return BoundsFile(
        Path(name), parse_bounds({"bounds": bounds}), PipelineMetadata(ranks=len(ranks)), order,
        order.n_stages, order.n_microbatches, tuple(notes),
    )  # fmt: skip


def _pairs(
    samples: Mapping[Action, Sequence[float]], weight_share: float
) -> Iterator[tuple[tuple[int, ActionKind], Pair]]:
    """Yield (shortest, longest) durations by stage and kind: medians, and what freezing leaves."""
    alike: dict[tuple[int, ActionKind], list[float]] = defaultdict(list)
    for action, took_ms in samples.items():
        alike[action.stage, action.kind] += took_ms
    for (stage, kind), took_ms in alike.items():
        left = 0.0 if kind is ActionKind.WEIGHT_BACKWARD else 1.0
        if kind is ActionKind.FULL_BACKWARD:
            left = 1.0 - weight_share if stage else 0.0
        yield (stage, kind), (left * statistics.median(took_ms), statistics.median(took_ms))
