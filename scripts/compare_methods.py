#!/usr/bin/env python3
"""Compares freezing methods: runs them over schedules and seeds, and tables what they brought.

    python scripts/compare_methods.py run CONFIG.toml OUTPUT --methods none timelyfreeze apf
        --schedules GPipe 1F1B --seeds 42 22 11 --nproc 4 [-- --training.steps=500 ...]
    python scripts/compare_methods.py table RUN_FOLDER [...] [--output FOLDER]

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
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from comparison_jobs import Settings, mistakes, plan_jobs
from comparison_launch import Starter, conflicts, run_jobs, start
from comparison_runs import find_runs
from comparison_table import compare, render_csv, render_table

from timelyfreeze.runs.losses import WINDOW


def main(arguments: Sequence[str], *, starter: Starter = start) -> int:
    """Run or table, and return the exit status."""
    arguments = list(arguments)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:split])
    try:
        if options.window < 1:
            raise ValueError(f"--window is {options.window}; it must be 1 or more")
        if options.what == "run":
            return _run(options, tuple(arguments[split + 1 :]), starter)
        if arguments[split:]:
            raise ValueError(f"{' '.join(arguments[split:])}: table starts no trainer")
        _table(options.folders, options.output, options.window)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


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
    found = mistakes(jobs, settings) or list(conflicts(jobs, settings, output))
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
    found = find_runs(folders)
    if not found.runs and not found.unreadable:
        names = ", ".join(str(folder) for folder in folders)
        raise ValueError(f"no summary.json below {names}; a run writes it when it ends")
    compared = compare(found.runs, window)
    text = render_table(compared, found.unreadable, window)
    print(f"\n{text}", end="")
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "comparison.md").write_text(text)
        (output / "comparison.csv").write_text(render_csv(compared))


if __name__ == "__main__":
    # Asked to end, it ends the run that is on its way as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; the same command goes on from here")
