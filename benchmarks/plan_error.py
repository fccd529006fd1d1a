#!/usr/bin/env python3
"""Holds plans made from one bounds file against runs of other pipelines.

    python benchmarks/plan_error.py BOUNDS [BOUNDS ...] --runs RUN_FOLDER [...]

BOUNDS are bounds.json of profiles or of runs; every run below the folders of --runs is predicted
from each of them: its schedule, its microbatches, its split and its cap, nothing else of it. The
table has the batch without freezing and under the plan; an error is how far the measured time is
above the predicted one. Where the file and the run are the same, it is the plan's own error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prediction_table import excess, metrics_of

from timelyfreeze.compare.runs.run import FINISHED, Run, find_runs
from timelyfreeze.files import markdown_lines
from timelyfreeze.files.options import status_of
from timelyfreeze.settings import ALL_OR_NOTHING, USE
from timelyfreeze.whatif.answers import answer
from timelyfreeze.whatif.bounds_file import BoundsFile, read_bounds_file
from timelyfreeze.whatif.grid import Grid, render_cap, render_split

HEAD = (
    "planned from", "run", "microbatches", "layers", "r_max", "batch without, planned", "measured",
    "error", "batch with, planned", "measured", "error", "gain planned", "measured",
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Print the table and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bounds", type=Path, nargs="+", metavar="BOUNDS")
    parser.add_argument("--runs", type=Path, nargs="+", required=True, metavar="RUN_FOLDER")
    options = parser.parse_args(arguments)
    return status_of(lambda: _table(options.bounds, options.runs))


def _table(bounds: Sequence[Path], folders: Sequence[Path]) -> int:
    files = [read_bounds_file(path) for path in bounds]
    found = find_runs(folders)
    runs = [run for run in found.runs if run.status == FINISHED]
    for problem in found.unreadable:
        print(f"not read: {problem}", file=sys.stderr)
    if not runs:
        raise ValueError("--runs has no finished run")
    rows = ([name_of(file), *_cells(file, run)] for file in files for run in runs)
    for line in markdown_lines(HEAD, rows):
        print(line, flush=True)
    return 0


def _cells(file: BoundsFile, run: Run) -> list[str]:
    own = read_bounds_file(run.folder / "bounds.json")
    metrics = metrics_of(run)
    planned_ms = planned(file, own, metrics)
    measured_ms = [metrics["batch_unfrozen_ms_measured"], metrics["batch_ms_measured"]]
    cells = [metrics["schedule"], str(own.n_microbatches), render_split(own.notes.layers or ())]
    cells.append(render_cap(metrics["max_freeze_ratio"]))
    for predicted, measured in zip(planned_ms, measured_ms, strict=True):
        cells += [f"{predicted:.1f}", "-" if measured is None else f"{measured:.1f}"]
        cells.append(_percent(excess(measured, predicted)))
    return [*cells, _percent(excess(*planned_ms)), _percent(excess(*measured_ms))]


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:+.1%}"


def planned(file: BoundsFile, own: BoundsFile, metrics: dict[str, Any]) -> tuple[float, float]:
    """Return the batch of a run as planned from another file, without and with freezing, in ms.

    Args:
        file: What was measured elsewhere.
        own: The run's bounds file, of which the shape of the pipeline counts, and no time.
        metrics: The run's schedule and cap.

    Raises:
        ValueError: If the file does not tell it.
    """
    if own.n_ranks is None:
        raise ValueError(f"{own.path} does not say how many ranks it has")
    grid = Grid(
        schedules=(metrics["schedule"],),
        caps=(metrics["max_freeze_ratio"],),
        microbatches=(own.n_microbatches,),
        splits=(own.notes.layers or "default",),
        n_ranks=own.n_ranks,
        first_stage=own.notes.first_stage or ALL_OR_NOTHING,
        skip_input_grads=own.notes.skip_input_grads or USE,
        n_processors=own.notes.processors,
    )
    case = answer(file, grid).cases[0]
    return case.step_ms, case.frozen_step_ms


def name_of(file: BoundsFile) -> str:
    """Return what a reader calls a bounds file."""
    kind = "run" if file.notes.stages is None else "profile"
    return f"{kind}: {file.notes.schedule}, {file.n_stages} stages x {file.n_microbatches}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
