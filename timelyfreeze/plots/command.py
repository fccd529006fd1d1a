"""The command ``timelyfreeze draw``: plots and traces from a run's files alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from timelyfreeze.plots.drawing import PLOTS_FOLDER, draw_run


def main(arguments: Sequence[str]) -> int:
    """Draw, and return the exit status: 1 if a file could not be read, 2 if there is no run."""
    parser = argparse.ArgumentParser(
        prog="timelyfreeze draw",
        description="Draws every plot that the files of a run folder allow (PNG and SVG), "
        "writes traces for ui.perfetto.dev, and says what is missing. Needs no device.",
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN_FOLDER", help="outputs/tb/<run>")
    where = f"where the files go; default: {PLOTS_FOLDER}/ in the run folder"
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=where)
    options = parser.parse_args(arguments)
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
