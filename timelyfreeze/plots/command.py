"""The command ``python -m timelyfreeze draw``: plots and traces from a run's files alone."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from timelyfreeze.plots.drawing import PICTURES_FOLDER, draw_run


def add_draw_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``draw`` with its options to a parser's commands."""
    parser = commands.add_parser(
        "draw",
        help="plots and traces of a run",
        description="Draws every plot that the files of a run folder allow (PNG and SVG), "
        "writes traces for ui.perfetto.dev, and says what is missing. Needs no device.",
    )
    parser.set_defaults(run=draw)
    parser.add_argument("run_folder", type=Path, metavar="RUN_FOLDER", help="outputs/tb/<run>")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help=f"where the files go; default: {PICTURES_FOLDER}/ in the run folder",
    )


def draw(options: argparse.Namespace) -> int:
    """Draw what the options ask for; return the exit status: 1 if a file could not be read."""
    try:
        drawn = draw_run(options.run_folder, options.output)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for file in drawn.files:
        print(f"wrote {file}")
    for name, reason in drawn.missing.items():
        print(f"no {name}: {reason}")
    for name, reason in drawn.broken.items():
        print(f"error: {name}: {reason}", file=sys.stderr)
    return 1 if drawn.broken else 0
