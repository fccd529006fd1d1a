#!/usr/bin/env python3
"""Shows what many runs have to say: a table, plots, and one page with all of it.

    python timelyfreeze/compare/show_command.py RUN [RUN ...] [--output FOLDER] [--reference RUN]

RUN is the folder of a run, or one with runs below it: every summary.json counts, wherever the run
was made. Repeats, that is runs which differ in their seeds alone, are averaged.

The table is printed. FOLDER gets comparison.html, a page that needs no other file, comparison.md,
comparison.csv with all single runs, and each plot as PNG and SVG. Exit status 1 if there were
runs that could not be read; all others are compared.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from timelyfreeze.cli.options import status_of
from timelyfreeze.compare.command import find_any, keep, run_process
from timelyfreeze.compare.groups import compare, group
from timelyfreeze.compare.metrics import Terms
from timelyfreeze.compare.page import render_page, render_plots
from timelyfreeze.compare.plots import KINDS, plots
from timelyfreeze.compare.runs import Run, find_runs
from timelyfreeze.compare.table import render_csv, render_table, tabulate
from timelyfreeze.plots import style
from timelyfreeze.records import WINDOW

OUTPUT = Path("outputs/comparison")
TITLE = "Runs compared"


def main(arguments: Sequence[str]) -> int:
    """Compare, and return the exit status."""
    options = _parser().parse_args(arguments)
    return status_of(lambda: _compare(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FOLDER",
                        help=f"where everything goes (default {OUTPUT})")  # fmt: skip
    parser.add_argument("--reference", type=Path, metavar="RUN",
                        help="run whose last loss the others are to reach")  # fmt: skip
    parser.add_argument("--title", default=TITLE, help=f"of the page (default {TITLE!r})")
    parser.add_argument("--window", type=int, default=WINDOW,
                        help=f"logged losses in a running mean (default {WINDOW})")  # fmt: skip
    return parser


def _compare(options: argparse.Namespace) -> int:
    """Write everything; return 1 if a run could not be read.

    Raises:
        ValueError: If there is nothing to compare, or an option is wrong.
    """
    if options.window < 1:
        raise ValueError(f"--window is {options.window}; it must be 1 or more")
    if options.output.exists() and not options.output.is_dir():
        raise ValueError(f"--output is {options.output}, which is no folder")
    found = find_any(options.runs)
    for problem in found.unreadable:
        print(f"not read: {problem}", file=sys.stderr)
    if not found.runs:
        raise ValueError("none of the runs can be read")
    reference = None if options.reference is None else _reference(options.reference)
    terms = Terms(options.window, reference)
    compared = compare(found.runs, terms)
    table = tabulate(compared, found.unreadable, terms)
    text = render_table(table, terms)
    print(text, end="", flush=True)
    groups = group(compared)
    _remove_plots(options.output)
    shown, images = [], {}
    for plot in plots(groups, terms):
        shown.append(plot)
        if plot.figure is not None:
            png, _ = style.save(plot.figure, options.output, plot.name)
            images[plot.name] = png.read_bytes()
    keep(
        options.output,
        [
            ("comparison.md", text + render_plots(shown)),
            ("comparison.csv", render_csv(compared)),
            ("comparison.html", render_page(options.title, table, groups, shown, images)),
        ],
    )
    print(f"\nthe page: {options.output / 'comparison.html'}")
    return 1 if found.unreadable else 0


def _reference(folder: Path) -> Run:
    """Return the one run below ``folder``.

    Raises:
        ValueError: If there is another number of them, or it cannot be read.
    """
    found = find_runs([folder])
    if found.unreadable:
        raise ValueError(f"--reference cannot be read: {'; '.join(found.unreadable)}")
    if len(found.runs) != 1:
        raise ValueError(f"--reference {folder} holds {len(found.runs)} runs; name one of them")
    return found.runs[0]


def _remove_plots(output: Path) -> None:
    """Remove plots that an earlier comparison left: of other runs, they would mislead."""
    ours = re.compile(rf"({'|'.join(KINDS)})(_\d+)?\.(png|svg)")
    for path in output.glob("*"):
        if ours.fullmatch(path.name):
            path.unlink()


if __name__ == "__main__":
    run_process(main)
