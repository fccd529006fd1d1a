"""Bounds files, read without the schedule they belong to.

A training run and the profile save the same files: ``bounds.json``, and ``schedule.csv`` beside it.
The bounds file may have one more entry, ``pipeline`` (``notes``).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from timelyfreeze.files import parse_json, to_plain
from timelyfreeze.schedule import (
    Action,
    ActionKind,
    PipelineDag,
    ScheduleOrder,
    build_dag,
    order_from_csv,
)
from timelyfreeze.timing import DurationBounds, bounds_to_json, parse_bounds, play_batch, receiving
from timelyfreeze.whatif.notes import PipelineNotes, parse_notes
from timelyfreeze.whatif.times import (
    Links,
    Pair,
    StageTimes,
    bounds_from_times,
    complete_times,
    median_pairs,
)

PIPELINE = "pipeline"
ORDER_FILE = "schedule.csv"


@dataclass(frozen=True)
class BoundsFile:
    """A bounds file with the order that lies beside it."""

    path: Path  # where it was read from
    bounds: Mapping[Action, Pair]  # (shortest, longest) duration of every action, milliseconds
    notes: PipelineNotes  # what else it says
    order: ScheduleOrder | None  # the order it belongs to, if that lies beside it
    n_stages: int  # number of stages
    n_microbatches: int  # number of microbatches
    # What messages cost: their overhead, which is part of ``bounds``, and their latency.
    links: Links
    # What a step takes besides its batches, for each of them; 0 if it is not told.
    outside_ms: float = 0.0
    # 9 of 10 of the run's batches take between 1 / this and this times what the bounds say; None if
    # it is not told.
    interval_factor: float | None = None
    captured: float = 0.0  # part of the gradients' energy that frozen weights keep
    captured_mean: float = 0.0  # and of the mean gradient

    @property
    def n_ranks(self) -> int | None:
        """Number of pipeline ranks, where the file or the order beside it tells."""
        return self.notes.ranks if self.order is None else self.order.n_ranks

    def stage_times(self) -> tuple[StageTimes, ...]:
        """Return the times of each stage: those noted, else medians over its microbatches.

        The overhead of messages is no part of them, unless ``keeps_overhead``.
        """
        if self.notes.stages is not None:
            return self.notes.stages
        bounds = self.bounds if self.keeps_overhead else _without_overhead(self)
        return tuple(
            complete_times(median_pairs(bounds, stage), is_first=stage == 0)
            for stage in range(self.n_stages)
        )

    def measured(self, dag: PipelineDag) -> DurationBounds:
        """Return the bounds as the run had them, whose pipeline ``dag`` is."""
        pairs = np.array([self.bounds[action] for action in dag.actions])
        links = self.links
        return DurationBounds(
            pairs[:, 0],
            pairs[:, 1],
            p2p_overhead_ms=links.p2p_overhead_ms,
            p2p_latency_ms=links.p2p_latency_ms,
        )

    @property
    def keeps_overhead(self) -> bool:
        """Whether nobody knows which actions have the overhead of a message in them."""
        return self.links.p2p_overhead_ms > 0.0 and self.order is None

    @property
    def derived_kinds(self) -> str:
        """Actions whose times were not measured but follow from others, such as "I and W"."""
        if self.notes.stages is not None:
            return ""
        kinds = {action.kind for action in self.bounds}
        if ActionKind.FULL_BACKWARD not in kinds:
            return "B"
        return "" if ActionKind.WEIGHT_BACKWARD in kinds else "I and W"


def bounds_file_text(dag: PipelineDag, bounds: DurationBounds, notes: PipelineNotes) -> str:
    """Write bounds that fit ``dag``, and notes, as JSON; ``bounds_from_json`` reads the bounds.

    Raises:
        ValueError: As ``bounds_to_json``.
    """
    return bounds_to_json(dag, bounds, {PIPELINE: to_plain(notes)})


def read_bounds_file(path: Path) -> BoundsFile:
    """Read a bounds file, its notes, and the order beside it if there is one.

    Raises:
        ValueError: If a file cannot be read or is none of ours; the message names file, row and
            key.
    """
    text = _read(path)
    try:
        data = parse_json(text)
    except ValueError as error:
        told: object = error
        if isinstance(error, json.JSONDecodeError):
            told = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise ValueError(f"{path}: {told}; a bounds file is JSON") from error
    if not isinstance(data, dict) or not isinstance(data.get("bounds"), dict):
        raise ValueError(
            f'{path} is no bounds file: it has no object "bounds"; a run saves one as bounds.json'
        )
    try:
        table = parse_bounds(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    bounds = table.bounds
    if not bounds:
        raise ValueError(f"{path}: bounds is empty")
    n_stages = 1 + max(action.stage for action in bounds)
    n_microbatches = 1 + max(action.microbatch for action in bounds)
    _check_bounds(path, bounds, n_stages, n_microbatches)
    notes = parse_notes(f"{path}: {PIPELINE}", data.get(PIPELINE, {}), n_stages)
    links = Links(
        table.p2p_overhead_ms, {(a, b): ms for (a, b), ms in table.p2p_latency_ms.items()}
    )
    order = _order_beside(path, bounds)
    file = BoundsFile(
        path,
        bounds,
        notes,
        order,
        n_stages,
        n_microbatches,
        links,
        table.outside_ms,
        table.interval_factor,
        table.captured,
        table.captured_mean,
    )
    if not file.keeps_overhead:
        _without_overhead(file)
    return file


def _without_overhead(file: BoundsFile) -> dict[Action, Pair]:
    """Return the bounds without the overhead of messages, which a rounding error may miss."""
    overhead_ms = file.links.p2p_overhead_ms
    if file.order is None or overhead_ms == 0.0:
        return dict(file.bounds)
    dag = build_dag(file.order)
    found = dict(file.bounds)
    for i in np.flatnonzero(receiving(dag)).tolist():
        action = dag.actions[i]
        low, high = file.bounds[action]
        if low < overhead_ms * (1.0 - 1e-9):
            raise ValueError(
                f"{file.path}: bounds.{action}.min_ms is {low}, less than the overhead of the "
                f"message in it (p2p_overhead_ms, {overhead_ms})"
            )
        found[action] = (max(low - overhead_ms, 0.0), max(high - overhead_ms, 0.0))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"{path} cannot be read: {reason}") from error


def _check_bounds(
    path: Path, bounds: Mapping[Action, Pair], n_stages: int, n_microbatches: int
) -> None:
    for action, (low, high) in bounds.items():
        where = f"{path}: bounds.{action}"
        if low > high:
            raise ValueError(f"{where}: min_ms {low} is above max_ms {high}")
        if low < high and not action.kind.freezable:
            raise ValueError(
                f"{where}: min_ms {low} and max_ms {high} differ; {action.kind.value} computes no "
                "weight gradient, so both must be equal"
            )
    for stage, microbatch in itertools.product(range(n_stages), range(n_microbatches)):
        forward, full, inputs, weights = (Action(stage, k, microbatch) for k in ActionKind)
        if forward not in bounds:
            raise ValueError(f"{path}: bounds has no {forward}")
        if (inputs in bounds) != (weights in bounds) or (full in bounds) == (inputs in bounds):
            raise ValueError(
                f"{path}: bounds must have either {full} or both {inputs} and {weights}"
            )


def _order_beside(path: Path, bounds: Mapping[Action, Pair]) -> ScheduleOrder | None:
    beside = path.parent / ORDER_FILE
    if not beside.is_file():
        return None
    try:
        order = order_from_csv(_read(beside))
    except ValueError as error:
        raise ValueError(f"{beside}: {error}") from error
    odd = sorted(map(str, {action for row in order.ranks for action in row} ^ set(bounds)))
    if odd:
        raise ValueError(
            f"{path} and {beside.name} beside it do not have the same actions: {odd[0]} is in only "
            f"one of them ({len(odd)} such actions); keep the two files of one run together"
        )
    return order


class Recall(NamedTuple):
    """The measured batch from its bounds and from times of stages, nothing frozen, milliseconds."""

    measured_ms: float
    from_stages_ms: float


def recall(file: BoundsFile, n_processors: float | None = None) -> Recall | None:
    """Compare what was measured with what times of stages make of it, nothing frozen.

    Microbatches of a stage are taken to be alike, and stages to be those of ``stage_times``; this
    tells what that costs. None where the order is not beside the file.
    """
    if file.order is None:
        return None
    dag = build_dag(file.order)
    measured = file.measured(dag).max_ms
    modelled = bounds_from_times(dag, file.stage_times()).max_ms + file.links.lead_ms(dag)
    delays = file.links.delays_ms(dag)
    return Recall(
        play_batch(dag, measured, n_processors, delays)[1],
        play_batch(dag, modelled, n_processors, delays)[1],
    )
