#!/usr/bin/env python3
"""Shows whether predictions hold: predicted and measured times over schedules and caps.

    python benchmarks/prediction_error.py run CONFIG.toml OUTPUT --pipelines emulated:4 real:2
        [--schedules GPipe 1F1B] [--r-max 0.3 0.8] [--repeats 2] [-- --training.steps=60 ...]
    python benchmarks/prediction_error.py table RUN_FOLDER [...] [--output FOLDER]

run    trains one after another: a pipeline in one process, its ranks emulated, or a process for
       each rank; one thread each on a CPU. What OUTPUT already has is not run again. Ends with the
       table of all runs in OUTPUT. What follows -- goes to the trainer. Exit status 1 if a run
       failed.
table  reads what runs wrote, wherever they were made: every summary.json below the folders counts.

The table is printed. It goes to prediction.md as well, and single runs to prediction.csv, in OUTPUT
or in the folder of --output.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from prediction_jobs import errors, parse_pipeline, plan_jobs
from prediction_table import collect, render_csv, render_table

from timelyfreeze.cli.options import status_of
from timelyfreeze.compare.command import keep, parse
from timelyfreeze.compare.jobs import Settings
from timelyfreeze.compare.launch import Starter, resumable, run_jobs, start
from timelyfreeze.compare.runs import FoundRuns, Run, find_any

SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"]


def main(arguments: Sequence[str], *, starter: Starter = start) -> int:
    """Run or table, and return the exit status."""
    options, trainer_arguments = parse(_parser(), arguments)
    command = shlex.join(["python", "benchmarks/prediction_error.py", *arguments])

    def work() -> int:
        if options.what == "run":
            return _run(options, trainer_arguments, command, starter)
        if trainer_arguments:
            raise ValueError(f"-- {' '.join(trainer_arguments)}: table starts no trainer")
        _table(options.folders, options.output, command)
        return 0

    with resumable():
        return status_of(work)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    run = commands.add_parser("run", help="make the runs, then the table")
    run.add_argument("config", type=Path, metavar="CONFIG", help="TOML file of all runs")
    run.add_argument("output", type=Path, metavar="OUTPUT", help="folder of all runs")
    run.add_argument(
        "--pipelines",
        nargs="+",
        default=["emulated:4", "real:2"],
        metavar="KIND:RANKS",
        help="emulated:N in one process, real:N in N (default emulated:4 real:2)",
    )
    run.add_argument("--schedules", nargs="+", default=SCHEDULES)
    run.add_argument("--r-max", nargs="+", type=float, default=[0.3, 0.5, 0.8])
    run.add_argument("--repeats", type=int, default=1, help="runs of each setting (default 1)")
    table = commands.add_parser("table", help="the table of runs that were made before")
    table.add_argument("folders", type=Path, nargs="+", metavar="RUN_FOLDER")
    table.add_argument("--output", type=Path, help="folder for prediction.md and prediction.csv")
    return parser


def _run(
    options: argparse.Namespace,
    trainer_arguments: tuple[str, ...],
    command: str,
    starter: Starter,
) -> int:
    # The trainer starts in the repository, not where this script was started.
    settings = Settings(options.config.resolve(), trainer_arguments)
    output = options.output.resolve()
    pipelines = [parse_pipeline(text) for text in options.pipelines]
    jobs = plan_jobs(pipelines, options.schedules, options.r_max, options.repeats)
    found = errors(jobs, settings)
    if found:
        raise ValueError("\n       ".join(found))
    # So that an emulated rank computes as a real one does.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    failed = run_jobs(jobs, settings, output, starter=starter)
    _table([output], output, command)
    return 1 if failed else 0


def _table(folders: Sequence[Path], output: Path | None, command: str) -> None:
    """Print the table of the runs below ``folders`` and keep it in ``output``.

    Raises:
        ValueError: If there are no runs.
    """
    found = find_any(folders)
    metrics, problems = collect(found)
    text = render_table(metrics, problems, _head(found, command))
    print(f"\n{text}", end="")
    if output is not None:
        keep(output, [("prediction.md", text), ("prediction.csv", render_csv(metrics))])


def _head(found: FoundRuns, command: str) -> str:
    """Return what the runs were made on, and the command."""
    return (
        "# Predicted and measured\n\n"
        f"`{command}`\n\n"
        f"{', '.join(dict.fromkeys(map(_place, found.runs)))}. Milliseconds; an error is measured "
        "over predicted, minus 1. Of several runs the median (smallest..largest). An emulated "
        "pipeline is measured by its virtual clock.\n"
    )


def _place(run: Run) -> str:
    told = run.told
    if told is None:
        return "unknown"
    return f"{told.device}, {told.model}, {told.dataset}, torch {told.torch_version}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
