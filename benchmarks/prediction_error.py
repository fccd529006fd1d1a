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
import itertools
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prediction_table import CAP, collect, render_csv, render_table
from processes import SCHEDULES

from timelyfreeze.compare.command import keep
from timelyfreeze.compare.runs.jobs import (
    DEGREE,
    Job,
    Settings,
    Starter,
    resumable,
    run_jobs,
    start,
)
from timelyfreeze.compare.runs.run import Run, find_any
from timelyfreeze.compare.runs.sweep import errors
from timelyfreeze.files.options import number, parse_with_keys, status_of, whole


@dataclass(frozen=True)
class Pipeline:
    """How a pipeline runs: ``emulated`` in one process, or ``real``, a process for each rank."""

    kind: str
    ranks: int

    @property
    def name(self) -> str:
        """As on the command line."""
        return f"{self.kind}:{self.ranks}"

    @property
    def folder(self) -> str:
        """What its folder of runs is called."""
        return f"{self.kind}_{self.ranks}"

    @property
    def is_emulated(self) -> bool:
        """Whether all ranks are in one process."""
        return self.kind == "emulated"

    @property
    def n_processes(self) -> int:
        """How many processes it has."""
        return 1 if self.is_emulated else self.ranks


def parse_pipeline(text: str) -> Pipeline:
    """Read a pipeline such as ``emulated:4``; the type of an option."""
    kind, _, ranks = text.partition(":")
    if kind not in ("emulated", "real") or not ranks.isdecimal() or int(ranks) < 2:
        raise argparse.ArgumentTypeError(
            f"{text!r} is given; it must be emulated:N or real:N with 2 ranks or more"
        )
    return Pipeline(kind, int(ranks))


def job_of(pipeline: Pipeline, schedule: str, cap: float, repeat: int) -> Job:
    """Return a run to be made."""
    return Job(
        label=f"{pipeline.name} {schedule} r_max {cap:g} repeat {repeat}",
        path=Path(pipeline.folder, schedule, f"r_{cap:g}", f"repeat_{repeat}"),
        nproc=pipeline.n_processes,
        keys={
            "parallelism.pipeline_parallel_schedule": schedule,
            CAP: cap,
            DEGREE: pipeline.ranks,
            **({"emulation.enable": True} if pipeline.is_emulated else {}),
        },
        record={"schedule": schedule, "method": "timelyfreeze", "seed": None},
    )


def main(arguments: Sequence[str], *, starter: Starter = start) -> int:
    """Run or table, and return the exit status."""
    options, trainer_arguments = parse_with_keys(_parser(), arguments)
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


def add_run_options(run: argparse.ArgumentParser) -> None:
    """Add what says which pipelines run."""
    run.add_argument("config", type=Path, metavar="CONFIG", help="TOML file of all runs")
    run.add_argument("output", type=Path, metavar="OUTPUT", help="folder of all runs")
    run.add_argument(
        "--pipelines",
        type=parse_pipeline,
        nargs="+",
        default=[Pipeline("emulated", 4), Pipeline("real", 2)],
        metavar="KIND:RANKS",
        help="emulated:N in one process, real:N in N (default emulated:4 real:2)",
    )
    run.add_argument("--r-max", nargs="+", type=number(0.0, 1.0), default=[0.3, 0.5, 0.8])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    run = commands.add_parser("run", help="make the runs, then the table")
    add_run_options(run)
    run.add_argument("--schedules", nargs="+", default=SCHEDULES)
    run.add_argument("--repeats", type=whole(1), default=1, help="runs of each setting (default 1)")
    table = commands.add_parser("table", help="the table of runs that were made before")
    table.add_argument("folders", type=Path, nargs="+", metavar="RUN_FOLDER")
    table.add_argument("--output", type=Path, help="folder for prediction.md and prediction.csv")
    return parser


def _run(
    options: argparse.Namespace, trainer: Sequence[str], command: str, starter: Starter
) -> int:
    # The trainer starts in the repository, not where this script was started.
    settings = Settings(options.config.resolve(), tuple(trainer))
    output = options.output.resolve()
    # What is set against each other, the same pipeline emulated and real, follows each other.
    asked = itertools.product(
        range(options.repeats), options.schedules, options.r_max, options.pipelines
    )
    jobs = [job_of(pipeline, schedule, cap, repeat) for repeat, schedule, cap, pipeline in asked]
    if found := errors(jobs, settings, ["emulation.enable", "freezing.method"]):
        raise ValueError("\n       ".join(found))
    # So that an emulated rank computes as a real one does.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    failed = run_jobs(jobs, settings, output, starter=starter)
    _table([output], output, command)
    return 1 if failed else 0


def _table(folders: Sequence[Path], output: Path | None, command: str) -> None:
    """Print the table of the runs below ``folders`` and keep it in ``output``."""
    found = find_any(folders)
    runs, problems = collect(found)
    head = (
        "# Predicted and measured\n\n"
        f"`{command}`\n\n"
        f"{', '.join(dict.fromkeys(map(_place, found.runs)))}. Milliseconds; an error is measured "
        "over predicted, minus 1. Of several runs the median (smallest..largest). An emulated "
        "pipeline is measured by its virtual clock.\n"
    )
    text = render_table(runs, problems, head)
    print(f"\n{text}", end="")
    if output is not None:
        keep(output, [("prediction.md", text), ("prediction.csv", render_csv(runs))])


def _place(run: Run) -> str:
    told = run.told
    if told is None:
        return "unknown"
    return f"{told.device}, {told.model}, {told.dataset}, torch {told.torch_version}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
