"""Traces of PyTorch's profiler, one of each pipeline rank, as a bounds file.

Schedules of torch that run lists of actions annotate each action: ``PP:2F0`` is the forward of
microbatch 0 in stage 2. An annotation begins with the wait for a message, and of a GPU it says when
kernels were launched, not when they ran. An action therefore takes from the first to the end of the
last operation called within its annotation: kernels, else operations of its thread, and where a
trace has neither, the annotation's own time. GPU annotations ("gpu_user_annotation") are not used:
they lack kernels of backwards, launched by another thread (github.com/pytorch/kineto/issues/1022).
"""

from __future__ import annotations

import gzip
import re
import statistics
import zlib
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from json import JSONDecodeError
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.files import MOST, listed, parse_json, shown
from timelyfreeze.schedule import Action, ActionKind, ScheduleError, build_order
from timelyfreeze.timing import parse_bounds
from timelyfreeze.whatif.bounds_file import BoundsFile, PipelineMetadata

_ACTION = re.compile(r"PP:(\d+[FBIW]\d+)")
_SENDING = re.compile(r"PP:(\d{1,9})SEND_F\d+")
_MOST_BYTES = 2**29  # of a trace, unpacked; reading it takes twice as much memory
_CHUNK = 2**20  # bytes read at once; the list of events begins in the first ones
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


def is_trace(path: Path) -> bool:
    """Return whether a file seems to be a trace, by its beginning."""
    try:
        return b'"traceEvents"' in _bytes(path, _CHUNK)
    except ValueError:
        return False


def _bytes(path: Path, n: int) -> bytearray:
    """Return the first bytes of a file, unpacked, at least ``n`` if there are as many."""
    data = bytearray()
    try:
        with path.open("rb") as raw:
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            file = gzip.GzipFile(fileobj=raw) if packed else raw
            while len(data) < n and (more := file.read(_CHUNK)):
                data += more
        return data
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"it cannot be read: {error}") from error


class _Annotation(NamedTuple):
    """An annotation of an action; microseconds."""

    begin: float
    end: float
    action: Action
    thread: str  # process and thread


class _Trace:
    """What counts of a trace; microseconds, in flat arrays.

    Raises:
        ValueError: Saying what of the trace is broken or missing; does not name the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.annotations: list[_Annotation] = []
        self.sending: set[int] = set()  # stages that send their output on
        self.is_of_gpu = False
        self.operations: dict[str, array[float]] = defaultdict(_floats)  # of threads: begin, end
        self.launches, self.kernels = _floats(), _floats()  # correlation, begin, end
        data = _bytes(path, _MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"unpacked it has over {_MOST_BYTES >> 20} MiB; record fewer steps")
        # A byte a character, and no event is kept: a list of them takes ten times the memory.
        parse_json(data.decode("latin-1"), self._add)
        self.annotations.sort(key=lambda note: note.begin)
        self._check()
        self.actions = [note.action for note in self.annotations]
        n = len(set(self.actions))
        self.row = tuple(self.actions[:n])  # a batch, in the order of execution
        spans = self._spans() / _US_PER_MS
        self.durations_ms = np.nan_to_num(spans[:, 1] - spans[:, 0]).tolist()
        batches = [slice(i, i + n) for i in range(0, len(spans), n)]
        if any(len(set(self.actions[batch])) < n for batch in batches):
            raise ValueError(
                f"the {len(spans)} annotated actions, {n} different ones, are no whole batches; "
                "record whole steps of training alone, without validation"
            )
        self.batches_ms = [np.nanmax(spans[b, 1]) - np.nanmin(spans[b, 0]) for b in batches]

    def _add(self, event: dict[str, Any]) -> Any:
        """Take what counts of an event; return it where it is none."""
        name, category = event.get("name"), event.get("cat")
        if event.get("ph") != "X" or not isinstance(name, str):
            return event if "ph" not in event else None
        thread = f"{event.get('pid')} {event.get('tid')}"
        if category == "kernel" and not name.startswith("nccl"):
            self.kernels.extend((_correlation(event), *_span(event)))
        elif category in ("cuda_runtime", "cuda_driver") and "aunch" in name:
            self.launches.extend((_correlation(event), *_span(event)))
        elif category == "cpu_op":
            self.operations[thread].extend(_span(event))
        elif category == "gpu_user_annotation" or name.startswith("nccl:"):
            self.is_of_gpu = True
        elif match := _ACTION.fullmatch(name):
            action = Action.parse(match[1])
            self.annotations.append(_Annotation(*_span(event), action, thread))
        elif match := _SENDING.fullmatch(name):
            self.sending.add(int(match[1]))
        return None

    def _check(self) -> None:
        notes = self.annotations
        if not notes:
            raise ValueError(f"no action is annotated; {_HOW}")
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

    def _spans(self) -> NDArray[np.float64]:
        """Return begin and end of what ran in each annotation, shape [N, 2]; NaN for nothing."""
        notes = np.array([note[:2] for note in self.annotations])
        if self.kernels:
            launches = np.array(self.launches).reshape(-1, 3)
            launches = launches[launches[:, 0].argsort()]
            kernels = np.array(self.kernels).reshape(-1, 3)
            places = launches[:, 0].searchsorted(kernels[:, 0]).clip(max=len(launches) - 1)
            known = launches[places, 0] == kernels[:, 0]
            called, ran = launches[places[known], 1], kernels[known, 1:]
        elif operations := self.operations[self.annotations[0].thread]:
            ran = np.array(operations).reshape(-1, 2)
            called = ran[:, 0]
        else:
            return notes
        places = notes[:, 0].searchsorted(called, side="right") - 1
        inside = (places >= 0) & (called <= notes[places, 1])
        found = np.full((2, len(notes)), np.nan)
        np.fmin.at(found[0], places[inside], ran[inside, 0])
        np.fmax.at(found[1], places[inside], ran[inside, 1])
        if lacking := [n.action for n, at in zip(self.annotations, found[0], strict=True)
                       if np.isnan(at) and n.action.kind is ActionKind.FORWARD]:  # fmt: skip
            raise ValueError(
                f"no operation ran within PP:{lacking[0]}; annotate the forward itself"
            )
        return found.T


def _floats() -> array[float]:
    return array("d")


def _span(event: Mapping[str, Any]) -> tuple[float, float]:
    begin, took = (_number(event, event.get(key), key) for key in ("ts", "dur"))
    return begin, begin + took


def _correlation(event: Mapping[str, Any]) -> float:
    arguments = event.get("args")
    value = arguments.get("correlation") if isinstance(arguments, dict) else None
    return _number(event, value, "args.correlation")


def _number(event: Mapping[str, Any], value: Any, key: str) -> float:
    if type(value) in (int, float) and 0 <= value <= MOST:
        return float(value)
    raise ValueError(f"{key} of {shown(event['name'])} is {shown(value)}; it must be 0 or more")


def _read(path: Path) -> _Trace:
    try:
        return _Trace(path)
    except JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON, or was cut off: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


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
            f"{name}: {str(error).partition(' (a schedule')[0]}; plan takes a trace of each rank "
            f"of one pipeline, with whole batches; these have: {listed(found)}"
        ) from None
    alike: dict[tuple[int, ActionKind], list[float]] = defaultdict(list)
    for rank in ranks:
        for action, took_ms in zip(rank.actions, rank.durations_ms, strict=True):
            alike[action.stage, action.kind].append(took_ms)
    longest = {key: statistics.median(took_ms) for key, took_ms in alike.items()}
    bounds = {
        str(a): {
            "min_ms": longest[a.stage, a.kind] * _left(a, weight_share),
            "max_ms": longest[a.stage, a.kind],
        }
        for row in order.ranks
        for a in row
    }
    batches_ms = max((rank.batches_ms for rank in ranks), key=statistics.median)
    notes = [
        f"in the trace itself a batch takes {statistics.median(batches_ms):.1f} ms, the median of "
        f"{len(batches_ms)}; more than from its actions are messages and gaps between actions"
    ]
    if any(kind is ActionKind.FULL_BACKWARD for _, kind in alike):
        notes.append(
            f"a trace does not tell what freezing saves of a full backward: {weight_share:.0%} are "
            "taken for gradients of weights (--weight-share; a profile of a small Llama has 39 to "
            "41%, linear layers alone 50%), and in stage 0 all"
        )
    return BoundsFile(
        Path(name), parse_bounds({"bounds": bounds}), PipelineMetadata(ranks=len(ranks)), order,
        order.n_stages, order.n_microbatches, tuple(notes),
    )  # fmt: skip


def _left(action: Action, weight_share: float) -> float:
    """Return what freezing leaves of an action."""
    if action.kind is ActionKind.FULL_BACKWARD:
        return 1.0 - weight_share if action.stage else 0.0
    return 0.0 if action.kind is ActionKind.WEIGHT_BACKWARD else 1.0
