"""Look of all plots, and their saving.

A palette for colour-blind readers (Okabe and Ito's), common sizes, and equal files for equal data.
"""

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from timelyfreeze.files import write_whole

ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
BLACK = "#000000"
BROWN = "#8C5A2B"
OLIVE = "#6B7A1F"
# For lines and points of several kinds, the most different in grey first.
CYCLE = (BLUE, ORANGE, GREEN, VERMILLION, SKY, PURPLE, YELLOW, BLACK)

INK = "#1A1A1A"
FAINT_INK = "#666666"
GRID = "#D9D9D9"
LANE = "#F0F0F0"

WIDTH_INCHES = 10.0
TITLE_POINTS = 11.0
TEXT_POINTS = 9.0
SMALL_POINTS = 7.0
MOST_PNG_BYTES = 200_000
_MOST_COLUMNS = 4
# Tried one after the other until the file is small enough.
_DPI = (150, 120, 100)
# Enough for flat colours with smooth edges; the file is a third of the size.
_PNG_COLORS = 96

_SETTINGS: Any = {
    "font.family": "DejaVu Sans",
    "font.size": TEXT_POINTS,
    "axes.titlesize": TITLE_POINTS,
    "axes.labelsize": TEXT_POINTS,
    "axes.edgecolor": FAINT_INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": FAINT_INK,
    "ytick.color": FAINT_INK,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": TEXT_POINTS,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",
    "svg.hashsalt": "timelyfreeze",
}


@contextmanager
def house_style() -> Iterator[None]:
    """Draw with the house's settings; other settings come back afterwards."""
    with matplotlib.rc_context(_SETTINGS):
        yield


def panels(
    names: Sequence[str], height: float, title: str, *, x_label: str, y_label: str, sharey: bool
) -> tuple[Figure, list[Axes]]:
    """Return a figure with axes for ``names``, in even rows of ``height`` inches."""
    n_rows = math.ceil(len(names) / _MOST_COLUMNS)
    n_columns = math.ceil(len(names) / n_rows)
    figure = Figure(figsize=(WIDTH_INCHES, 0.7 + height * n_rows), layout="constrained")
    grid = figure.subplots(n_rows, n_columns, sharex=True, sharey=sharey, squeeze=False)
    for axes, name in zip(grid.flat, names, strict=False):
        axes.set_title(name, fontsize="medium")
    for axes in grid.flat[len(names) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel(y_label)
    # The lowest of each column, also where the last row is not full.
    for axes in list(grid.flat)[: len(names)][-n_columns:]:
        axes.set_xlabel(x_label)
        axes.tick_params(labelbottom=True)
    figure.suptitle(title, x=0.01, ha="left")
    return figure, list(grid.flat[: len(names)])


def annotate(
    axes: Axes,
    text: str,
    at: tuple[float, float],
    within: str | tuple[str, str],
    *,
    shift: tuple[float, float] = (0, 0),
    color: str = FAINT_INK,
    **look: Any,
) -> None:
    """Write small text beside the place ``at`` of a plot, ``shift`` points away from it.

    ``within`` is the unit of the place, as matplotlib's ``xycoords``.
    """
    look |= {"fontsize": SMALL_POINTS, "color": color, "annotation_clip": False}
    axes.annotate(text, at, shift, xycoords=within, textcoords="offset points", **look)


def save(figure: Figure, folder: Path, name: str) -> tuple[Path, Path]:
    """Write a plot as PNG and SVG; whoever reads meanwhile sees the old files or the new ones."""
    svg = io.BytesIO()
    with house_style():
        figure.savefig(svg, format="svg", metadata={"Date": None})
        png = _png(figure)
    return (
        write_whole(folder / f"{name}.png", png),
        write_whole(folder / f"{name}.svg", svg.getvalue()),
    )


def _png(figure: Figure) -> bytes:
    """Return the plot in the highest resolution below ``MOST_PNG_BYTES``."""
    small = io.BytesIO()
    for dpi in _DPI:
        large, small = io.BytesIO(), io.BytesIO()
        figure.savefig(large, format="png", dpi=dpi, facecolor="white")
        with Image.open(large) as image:
            few = image.convert("RGB").quantize(_PNG_COLORS, dither=Image.Dither.NONE)
            few.save(small, format="png", optimize=True)
        if small.tell() < MOST_PNG_BYTES:
            break
    return small.getvalue()
