"""The paper's figures, drawn from runs as `compare show` and `draw` draw them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from timelyfreeze.compare.groups import Group
from timelyfreeze.compare.metrics import Terms
from timelyfreeze.compare.paper.items import COMPARED, Item
from timelyfreeze.compare.plots import plots
from timelyfreeze.plots import gallery, style


@dataclass(frozen=True)
class DrawnFigure:
    """What became of a figure.

    Attributes:
        files: PNG and SVG files.
        missing: Why there is none, or what is not in it.
    """

    files: tuple[Path, ...]
    missing: tuple[str, ...] = ()


def draw_figure(item: Item, groups: Sequence[Group], folder: Path) -> DrawnFigure:
    """Draw a figure of the paper from runs into a folder.

    Raises:
        ValueError: If a run's file cannot be read.
    """
    origin, kind = item.plot
    name = f"figure_{item.number}"
    if origin == COMPARED:
        return _compared(kind, groups, folder, name)
    runs = [run for one in groups for run in one.runs]
    if not runs:
        return DrawnFigure((), ("no run has finished",))
    figure = dict(gallery.PLOTS)[kind](runs[0].folder)
    if isinstance(figure, str):
        return DrawnFigure((), (figure,))
    return DrawnFigure(tuple(style.save(figure, folder, name)))


def _compared(kind: str, groups: Sequence[Group], folder: Path, name: str) -> DrawnFigure:
    files: list[Path] = []
    missing: list[str] = []
    for plot in plots(groups, Terms()):
        if plot.kind == kind:
            missing += plot.missing
            if plot.figure is not None:
                number = f"_{plot.number}" if plot.number > 1 else ""
                files += style.save(plot.figure, folder, f"{name}{number}")
    return DrawnFigure(tuple(files), tuple(missing))
