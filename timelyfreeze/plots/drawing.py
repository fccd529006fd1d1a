"""Draws the plots of a run folder, and names the missing. Imports matplotlib late."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from timelyfreeze.files import write_obstacle, write_whole
from timelyfreeze.files.options import run_folder

PLOTS_FOLDER = "plots"


@dataclass(frozen=True)
class Drawn:
    """Results of drawing: plots, traces, and reasons."""

    files: tuple[Path, ...]
    missing: Mapping[str, str]  # reason by name, for what the run has no data of
    broken: Mapping[str, str]  # reason by name, for what could not be drawn although there is data


def draw_run(run_folder: Path, output: Path | None = None) -> Drawn:
    """Draw every plot, and write every trace, whose files a run folder has."""
    from matplotlib.figure import Figure

    from timelyfreeze.plots.gallery import PLOTS, TRACES, read_names
    from timelyfreeze.plots.style import save
    from timelyfreeze.records.trace import trace_to_json

    if not run_folder.is_dir():
        raise ValueError(f"{run_folder} is no folder; a run writes one under its dump folder")
    output = run_folder / PLOTS_FOLDER if output is None else output
    if obstacle := write_obstacle(output):
        raise ValueError(f"plots go to {output}, but {obstacle}; name another with --output")
    files: list[Path] = []
    missing: dict[str, str] = {}
    broken: dict[str, str] = {}
    try:
        read_names(run_folder)
    except ValueError as error:
        broken["titles"] = str(error)
    for name, draw in (*PLOTS, *TRACES):
        try:
            found = draw(run_folder)
        except (ValueError, OSError) as error:
            broken[name] = str(error)
            continue
        if isinstance(found, str):
            missing[name] = found
        elif isinstance(found, Figure):
            try:
                files.extend(save(found, output, name))
            except ValueError as error:  # found when texts and axes are laid out
                broken[name] = f"it cannot be drawn: {error}"
        elif found:
            files.append(write_whole(output / f"{name}.json", trace_to_json(found).encode()))
    return Drawn(tuple(files), missing, broken)


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
        drawn = draw_run(run_folder(options.run_folder), options.output)
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
