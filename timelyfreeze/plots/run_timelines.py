"""The timelines of a run folder, as plots and as traces.

A run leaves what it measured as ``timelines/measured_<phase>.json``; what its plan predicts follows
from ``bounds.json``, ``plan.json`` and ``schedule.csv``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from matplotlib.figure import Figure

from timelyfreeze.planning import plan_from_json
from timelyfreeze.plots.timeline import timeline_figure
from timelyfreeze.records import (
    FROZEN,
    MOVES,
    UNFROZEN,
    Move,
    Timeline,
    as_drawn,
    predicted_timelines,
    read_names,
    timeline_file,
    timeline_files,
    timeline_from_json,
    trace_to_json,
)
from timelyfreeze.schedule import build_dag, order_from_csv
from timelyfreeze.settings import Phase
from timelyfreeze.timing import bounds_from_json
from timelyfreeze.whatif.bounds_file import read_bounds_file

Value = TypeVar("Value")

_PLAN_FILES = ("bounds.json", "plan.json", "schedule.csv")


def draw_measured(run_folder: Path) -> Figure | str:
    """Draw a measured batch without freezing above one with; or say why there is none.

    Of a run that has moved to other pipelines there is one of each.

    Raises:
        ValueError: If a file cannot be read; so do the functions below.
    """
    # A run that was stopped early has only one of them.
    examples = [measured_batch(run_folder, phases) for phases in (UNFROZEN, FROZEN)]
    shown = [timeline for timeline in examples if timeline is not None] or _measured(run_folder)
    if moved := _of_pipelines(run_folder):
        unfrozen = {} if examples[0] is None else {"Without freezing": examples[0]}
        batches = unfrozen | moved
        first = next(iter(batches.values()))
        return timeline_figure([*batches.values()], run_title(run_folder, first), [*batches])
    return _figure(run_folder, shown) or (
        f"{run_folder / 'timelines'} has no measured_*.json: the run has no pipeline or no "
        "freezing, or ended before a phase was measured"
    )


def draw_predicted(run_folder: Path) -> Figure | str:
    """Draw the batch that the plan predicts, without freezing above with; or say why not."""
    missing = " and ".join(_missing_plan_files(run_folder))
    return _figure(run_folder, _predicted(run_folder)) or (
        f"{missing} missing: the run's method makes no plan, or none was made yet"
    )


def _of_pipelines(run_folder: Path) -> dict[str, Timeline]:
    """Return {what it is called: a frozen batch} of the pipelines that an elastic run had.

    Of several pipelines side by side it is a batch of one of them. Empty for a run without moves,
    and of a pipeline that it soon left nothing may have been measured.
    """
    if not (run_folder / MOVES.name).exists():
        return {}
    moves, last = MOVES.read(run_folder), timeline_file(run_folder, Phase.STABLE)
    names = ["In the first pipeline", *map(_move_words, moves)]
    # Files have numbers by plan where there are plans, so that steps tell the pipeline.
    found = [
        _of(file, timeline_from_json) for file in last.parent.glob(f"{last.stem}*{last.suffix}")
    ]
    firsts = [move.step for move in moves]
    by_step = sorted(found, key=lambda timeline: timeline.step or 0)
    return {names[bisect_right(firsts, each.step or 0)]: each for each in by_step}


def _move_words(move: Move) -> str:
    """Return where a run went on, such as "From step 9, 2 pipelines of 2 ranks, layers 8 2"."""
    pipelines = "a pipeline" if move.replicas == 1 else f"{move.replicas} pipelines"
    return f"From step {move.step}, {pipelines} of {move.ranks} ranks, layers {move.split}"


def measured_batch(run_folder: Path, phases: Sequence[Phase]) -> Timeline | None:
    """Return the batch measured in the first of ``phases`` that a run has one of."""
    files = (timeline_file(run_folder, phase) for phase in phases)
    file = next((file for file in files if file.exists()), None)
    return None if file is None else _of(file, timeline_from_json)


def predicted_batch(run_folder: Path, phases: Sequence[Phase]) -> Timeline | None:
    """Return the batch that a run's plan predicts for one of ``phases``; None without a plan."""
    return next((one for one in _predicted(run_folder) if one.phase in phases), None)


def trace_measured(run_folder: Path) -> str | None:
    """Return a trace of every batch that was measured; None where there is none."""
    return _trace(_measured(run_folder))


def trace_predicted(run_folder: Path) -> str | None:
    """Return a trace of the batches that the plan predicts; None where there is no plan."""
    return _trace(_predicted(run_folder))


def run_title(run_folder: Path, timeline: Timeline) -> str:
    """Return what a run is called above its plots: schedule, size and model, if it says so."""
    order = timeline.order
    size = f"{order.n_ranks} ranks, {order.n_microbatches} microbatches"
    try:
        names = read_names(run_folder)
    except ValueError:  # told once, by who draws all plots
        names = None
    if names is None:  # bounds and plan of another origin, such as the profile
        return size
    return as_drawn(f"{names.schedule}, {size}, {names.model}")


def _figure(run_folder: Path, timelines: Sequence[Timeline]) -> Figure | None:
    return timeline_figure(timelines, run_title(run_folder, timelines[0])) if timelines else None


def _trace(timelines: Sequence[Timeline]) -> str | None:
    return trace_to_json(timelines) if timelines else None


def _measured(run_folder: Path) -> list[Timeline]:
    """Return what was measured, in the order of phases."""
    return [_of(file, timeline_from_json) for file in timeline_files(run_folder)]


def _missing_plan_files(run_folder: Path) -> list[str]:
    return [name for name in _PLAN_FILES if not (run_folder / name).exists()]


def _predicted(run_folder: Path) -> Sequence[Timeline]:
    """Return the batch without freezing and that under the plan; empty where there is no plan.

    Raises:
        ValueError: If a file cannot be read, or the files belong to different pipelines.
    """
    if _missing_plan_files(run_folder):
        return ()
    files = {name: run_folder / name for name in _PLAN_FILES}
    notes = read_bounds_file(files["bounds.json"]).notes
    dag = _of(files["schedule.csv"], lambda text: build_dag(order_from_csv(text)))
    bounds = _of(files["bounds.json"], lambda text: bounds_from_json(dag, text))
    plan = _of(files["plan.json"], plan_from_json)
    try:
        timelines = predicted_timelines(dag, bounds, plan, notes.processors)
    except ValueError as error:
        raise ValueError(f"{files['plan.json']}: {error}") from error
    if not all(math.isfinite(timeline.batch_ms) for timeline in timelines):
        raise ValueError(f"{files['bounds.json']}: its times together are beyond all numbers")
    return timelines


def _of(file: Path, read: Callable[[str], Value]) -> Value:
    """Return what ``read`` makes of a file; a ValueError names it."""
    try:
        return read(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
