#!/usr/bin/env python3
"""Compares freezing methods: runs them over schedules and seeds, and tables what they brought.

    python timelyfreeze/compare/run_command.py run CONFIG.toml OUTPUT --methods none timelyfreeze apf
        --schedules GPipe 1F1B --seeds 42 22 11 --nproc 4 [-- --training.steps=500 ...]
    python timelyfreeze/compare/run_command.py table RUN_FOLDER [...] [--output FOLDER]

run    trains one after another, all methods of a schedule and seed in a row. What OUTPUT already
       has is not run again; a run that did not finish starts anew, and its old files move to
       OUTPUT/set_aside. Ends with the table of all runs in OUTPUT. What follows -- goes to the
       trainer. Exit status 1 if a run failed.
table  reads what runs wrote, wherever they were made: every summary.json below the folders counts.

The table is printed. It goes to comparison.md as well, and single runs to comparison.csv, in OUTPUT
or in the folder of --output.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from timelyfreeze.cli.options import status_of
from timelyfreeze.compare.command import (
    find_any,
    keep,
    parse,
    refuse_trainer_arguments,
    run_process,
)
from timelyfreeze.compare.groups import compare
from timelyfreeze.compare.jobs import Settings, errors, plan_jobs
from timelyfreeze.compare.launch import Starter, conflicts, run_jobs, start
from timelyfreeze.compare.metrics import Terms
from timelyfreeze.compare.table import render_csv, render_table, tabulate
from timelyfreeze.records import WINDOW


def main(arguments: Sequence[str], *, starter: Starter = start) -> int:
    """Run or table, and return the exit status."""
    options, trainer_arguments = parse(_parser(), arguments)

    def work() -> int:
        if options.window < 1:
            raise ValueError(f"--window is {options.window}; it must be 1 or more")
        if options.what == "run":
            return _run(options, trainer_arguments, starter)
        refuse_trainer_arguments(trainer_arguments)
        _table(options.folders, options.output, options.window)
        return 0

    return status_of(work)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    run = commands.add_parser("run", help="make the runs, then the table")
    run.add_argument("config", type=Path, metavar="CONFIG", help="TOML file of all runs")
    run.add_argument("output", type=Path, metavar="OUTPUT", help="folder of all runs")
    run.add_argument("--methods", nargs="+", required=True, help="values of freezing.method")
    run.add_argument("--schedules", nargs="+", required=True, help="pipeline schedules")
    run.add_argument("--seeds", nargs="+", type=int, default=[42])
    run.add_argument("--nproc", type=int, default=4, help="processes of a run (default 4)")
    table = commands.add_parser("table", help="the table of runs that were made before")
    table.add_argument("folders", type=Path, nargs="+", metavar="RUN_FOLDER")
    table.add_argument("--output", type=Path, help="folder for comparison.md and comparison.csv")
    for command in (run, table):
        command.add_argument(
            "--window",
            type=int,
            default=WINDOW,
            help=f"logged losses in a running mean (default {WINDOW})",
        )
    return parser


def _run(options: argparse.Namespace, trainer_arguments: tuple[str, ...], starter: Starter) -> int:
    # The trainer starts in the repository, not where this script was started.
    settings = Settings(options.config.resolve(), options.nproc, trainer_arguments)
    output = options.output.resolve()
    jobs = plan_jobs(options.methods, options.schedules, options.seeds)
    found = errors(jobs, settings) or list(conflicts(jobs, settings, output))
    if found:
        raise ValueError("\n       ".join(found))
    output.mkdir(parents=True, exist_ok=True)
    failed = run_jobs(jobs, settings, output, starter=starter)
    _table([output], output, options.window)
    return 1 if failed else 0


def _table(folders: Sequence[Path], output: Path | None, window: int) -> None:
    """Print the table of the runs below ``folders`` and keep it in ``output``.

    Raises:
        ValueError: If there are no runs.
    """
    found = find_any(folders)
    terms = Terms(window)
    compared = compare(found.runs, terms)
    text = render_table(tabulate(compared, found.unreadable, terms), terms)
    print(f"\n{text}", end="")
    if output is not None:
        keep(output, [("comparison.md", text), ("comparison.csv", render_csv(compared))])


if __name__ == "__main__":
    run_process(main)
