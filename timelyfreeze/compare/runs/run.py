"""The runs of a comparison, read from their files.

A run leaves ``summary.json`` and ``losses.csv`` in its folder when it ends, ``settings.json`` and
``steps.csv`` while it goes on, and ``evaluate`` its scores in ``scores.json``. ``timelyfreeze
compare run`` adds a record in the run's start folder, which also tells of runs without a summary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from timelyfreeze.compare.runs.errors import HeldOut, held_out
from timelyfreeze.compare.runs.parts import RECORD, joined, parts_of
from timelyfreeze.compare.runs.variants import read_value, run_label, split_peer
from timelyfreeze.files import Table, read_dataclass, read_object
from timelyfreeze.records import tables
from timelyfreeze.records.held_out import HELD_OUT
from timelyfreeze.records.scores import SCORES, Scores, read_scores
from timelyfreeze.records.summary import SUMMARY_FILE, RunSummary, read_summary

SETTINGS = "settings.json"
# Holds the scores of the model before training.
BASE_MODEL = "base_model"
# Holds what runs left that did not end; nothing in it counts.
SET_ASIDE = "set_aside"

FINISHED, UNFINISHED, FAILED = "finished", "unfinished", "failed"
NO_PLACE = "-"

Points = Sequence[tuple[float, float]]
# A number, "never" for a loss or an accuracy that was not reached, or None for what is not known.
Metric = float | str | None
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """A training run."""

    folder: Path  # where its files are
    # ``finished``, ``unfinished`` or ``failed``. A run is finished if it did all the steps that it
    # was asked for.
    status: str
    method: str  # the freezing method
    schedule: str  # the pipeline schedule; ``-`` without a pipeline
    seed: int | None  # the seed of the weights, or None if none was set
    # What the run says of itself; None if it ended before it wrote that.
    told: RunSummary | None = None
    # Seconds of training at the end of each step, moves to other pipelines included; empty where
    # they are not known.
    step_ends: Sequence[float] = ()
    # Whether seconds are those that the pipeline would have taken, had each emulated rank a device
    # of its own.
    by_virtual_clock: bool = False
    losses: Points = ()  # (seconds of training so far, training loss) of each step that was logged
    scores: Scores | None = None  # of the model that came out, None if it was not evaluated
    validation_losses: Points = ()  # (seconds of training so far, loss) of each validation
    held_out: HeldOut | None = None  # the losses of each part of these
    # (seconds of training so far, percent of the pictures) of each validation on pictures.
    top1: Points = ()
    freeze_ratios: Points = ()  # (step, freeze ratio) of each step for which it is known
    # The run's configuration, flat; empty if the run left none.
    settings: Mapping[str, Any] = field(default_factory=dict)
    # Keys that ``compare run`` was asked to vary, with the values of this run.
    variant: Mapping[str, Any] = field(default_factory=dict)
    # In a comparison: the settings in which it differs from other runs of its method, the run that
    # it is held against, and its metrics; none unless it has finished.
    apart: str = ""
    baseline: Run | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    @property
    def is_finished(self) -> bool:
        """Whether the run did all its steps."""
        return self.status == FINISHED

    @property
    def summary(self) -> RunSummary:
        """The run's summary; a ValueError without, as of unfinished runs."""
        if self.told is None:
            raise ValueError(f"{self.folder} has no {SUMMARY_FILE}")
        return self.told

    @property
    def seconds(self) -> float:
        """Seconds of training and moves, by the virtual clock where the pipeline is emulated."""
        if self.by_virtual_clock:
            return self.step_ends[-1]
        return self.summary.seconds + (self.summary.moves_seconds or 0.0)

    @property
    def step_seconds(self) -> float:
        """The same without moves."""
        return self.seconds - (self.summary.moves_seconds or 0.0)

    @property
    def place(self) -> str:
        """Devices and model of the run; ``NO_PLACE`` if unknown."""
        if self.told is None:
            return NO_PLACE
        ranks = self.told.emulated_ranks
        emulated = "" if ranks is None else f"{ranks} emulated ranks on "
        return f"{emulated}{self.told.n_devices} x {self.told.device}, {self.told.model}"

    @property
    def label(self) -> str:
        """The run's name for readers."""
        return run_label(self.schedule, self.method, self.seed, self.variant)


@dataclass(frozen=True)
class FoundRuns:
    """All runs below some folders, unreadable files, scores of models before training."""

    runs: tuple[Run, ...]
    unreadable: tuple[str, ...] = ()
    base_models: tuple[Scores, ...] = ()


def find_runs(folders: Iterable[Path]) -> FoundRuns:
    """Return the runs below ``folders``, by path; a record without a summary makes a run too."""
    folders = list(folders)
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; name folders that hold runs")
    unreadable: list[str] = []

    def read(name: str, reader: Callable[[Path], T]) -> Iterator[T]:
        paths = {path.resolve() for folder in folders for path in folder.rglob(name)
                 if SET_ASIDE not in path.relative_to(folder).parts}  # fmt: skip
        for path in sorted(paths):
            try:
                yield reader(path.parent)
            except (OSError, ValueError) as error:
                unreadable.append(f"{path.parent}: {error}")

    runs = list(read(SUMMARY_FILE, read_run))
    for recorded in read(RECORD, _recorded_run):
        own = [i for i, run in enumerate(runs) if run.folder.is_relative_to(recorded.folder)]
        has_finished = any(runs[i].is_finished for i in own)
        for i in own:
            method = recorded.method if split_peer(recorded.method) else runs[i].method
            status = runs[i].status if has_finished else recorded.status
            runs[i] = replace(runs[i], method=method, status=status, variant=recorded.variant)
        if has_finished:  # it has all that the parts before it did
            former = {runs[i].folder for i in own if not runs[i].is_finished}
            runs = [run for run in runs if run.folder not in former]
        if not own:
            runs.append(recorded)
    bases = tuple(scores for scores in read(f"{BASE_MODEL}/{SCORES}", read_scores) if scores)
    return FoundRuns(tuple(sorted(runs, key=lambda run: run.folder)), tuple(unreadable), bases)


def finished_run(folder: Path) -> Run | None:
    """Return the first finished run in ``folder``."""
    runs = find_runs([folder]).runs if folder.is_dir() else ()
    return next((run for run in runs if run.is_finished), None)


def find_any(folders: Sequence[Path]) -> FoundRuns:
    """Return the runs below ``folders``; a ValueError if there are none."""
    found = find_runs(folders)
    if not found.runs and not found.unreadable:
        names = ", ".join(map(str, folders))
        raise ValueError(f"no {SUMMARY_FILE} below {names}; a run writes it when it ends")
    return found


def read_run(folder: Path) -> Run:
    """Read the summary in ``folder``, and the run's other files, those of former parts too."""
    summary, parts = read_summary(folder), parts_of(folder)

    def rows(table: Table[T]) -> list[T]:
        return joined(table, parts)

    losses, steps, moves = rows(tables.LOSSES), rows(tables.STEPS), rows(tables.MOVES)
    if len(parts) > 1:
        summary = replace(
            summary,
            seconds=summary.seconds + parts[-1].before,
            moves=summary.moves and len(moves),
            moves_seconds=summary.moves_seconds and math.fsum(move.seconds for move in moves),
        )
    settings = read_object(folder / SETTINGS) if (folder / SETTINGS).exists() else {}
    virtual = virtual_ends(summary, steps, losses)

    def end(row: tables.StepRow | tables.LossRow | tables.AccuracyRow) -> float:
        # No step's time has any of a move; in an emulation a move took one process so long.
        moved = sum(move.seconds for move in moves if move.step <= row.step)
        return virtual.get(row.step, row.seconds) + moved

    return Run(
        folder=folder,
        status=FINISHED if summary.steps_done == summary.steps else UNFINISHED,
        method=summary.method,
        schedule=summary.schedule or "-",
        seed=summary.seed,
        told=summary,
        step_ends=[end(row) for row in steps],
        by_virtual_clock=bool(virtual),
        losses=_known((end(row), row.train_loss) for row in losses),
        scores=read_scores(folder),
        validation_losses=_known((end(row), row.validation_loss) for row in losses),
        held_out=held_out(
            rows(HELD_OUT),
            {row.step: end(row) for row in losses if row.validation_loss is not None},
        ),
        top1=[(end(row), 100 * row.top1) for row in rows(tables.ACCURACIES)],
        freeze_ratios=_known((row.step, row.freeze_ratio) for row in steps),
        settings=flatten(settings),
    )


def _known(points: Iterable[tuple[float, float | None]]) -> Points:
    return [(x, y) for x, y in points if y is not None]


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested ``settings`` as a level of dotted keys, as on the command line."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        is_section = isinstance(value, Mapping)
        flat |= flatten(value, f"{prefix}{name}.") if is_section else {prefix + name: value}
    return flat


@dataclass(frozen=True)
class _Record:
    """A run's record; without an exit status the run was cut off."""

    schedule: str
    method: str
    seed: int | None
    exit_status: int | None
    variant: Mapping[str, str] = field(default_factory=dict)


def _recorded_run(place: Path) -> Run:
    """Return a run with a record and without a summary."""
    values = read_object(place / RECORD)
    try:
        record = read_dataclass(_Record, values, partly=True)
    except ValueError as error:
        raise ValueError(f"{RECORD}: {error}") from None
    status = UNFINISHED if record.exit_status is None else FAILED
    variant = {key: read_value(text) for key, text in record.variant.items()}
    return Run(place, status, record.method, record.schedule, record.seed, variant=variant)


def virtual_ends(
    summary: RunSummary, steps: Sequence[tables.StepRow], losses: Sequence[tables.LossRow]
) -> dict[int, float]:
    """Return seconds at the end of each step by the virtual clock; empty without."""
    known = {
        row.step: row.virtual_step_ms / 1e3
        for row in steps
        if row.virtual_step_ms is not None and 0.0 < row.virtual_step_ms < math.inf
    }
    if summary.emulated_ranks is None or len(known) < len(steps):
        return {}
    found = dict(zip(known, itertools.accumulate(known.values()), strict=True))
    return found if all(row.step in found for row in losses) else {}
