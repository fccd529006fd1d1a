"""Names beside points and at the ends of lines, where they cover nothing.

Whoever reads a plot need not go to and fro between it and a legend. ``adjustText`` was tried: it
writes over bars and points, and never draws the same plot twice.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.transforms import Bbox

from timelyfreeze.plots import style

# Distances of a label from its point, in points, and the directions that are tried.
_RADII = (6.0, 12.0, 20.0, 30.0, 42.0, 56.0)
_DIRECTIONS = tuple(2.0 * math.pi * i / 12 for i in range(12))
# Beyond this distance a line leads from the label to its point.
_LEADS_FROM = 13.0
_LINE_SPACING = 1.3
# What an overlap costs in any case, in pixels of distance.
_OVERLAP = 200.0
_WRAP_AT = 24

# From one point to another.
Line = tuple[tuple[float, float], tuple[float, float]]


@dataclass(frozen=True)
class Label:
    """A text for a place, in the units of the axes."""

    x: float
    y: float
    text: str
    color: str


def wrap(text: str) -> str:
    """Return ``text`` with a line for each of its parts, if it is long."""
    return text.replace(", ", ",\n") if len(text) > _WRAP_AT else text


def label_points(axes: Axes, labels: Sequence[Label], bars: Sequence[Line]) -> None:
    """Write each text near its point, over no point, bar or other text if there is room.

    Bars are upright or level. The limits of ``axes`` must not change afterwards.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None  # axes that are drawn on lie in one
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    pixels = figure.dpi / 72.0
    places = [axes.transData.transform((label.x, label.y)) for label in labels]
    taken = [Bbox([[x - 6, y - 6], [x + 6, y + 6]]) for x, y in places]
    for ends in bars:
        corners = axes.transData.transform(ends)
        taken.append(Bbox([corners.min(axis=0) - 1, corners.max(axis=0) + 1]))
    inside = axes.get_window_extent(renderer)
    for label, (x, y) in zip(labels, places, strict=True):
        probe = axes.text(0, 0, wrap(label.text), fontsize=style.SMALL_POINTS)
        size = probe.get_window_extent(renderer)
        probe.remove()
        options = []
        for radius, angle in itertools.product(_RADII, _DIRECTIONS):
            box = _beside(x, y, radius * pixels, angle, size.width, size.height)
            outside = box.width * box.height - _overlap(box, inside)
            over = sum(_overlap(box, other) for other in taken) + outside
            # Any overlap is worse than being farther away.
            cost = _OVERLAP * (over > 0.0) + 2.0 * over
            options.append((cost + radius * pixels, radius, box))
        _, radius, box = min(options, key=lambda option: option[0])
        taken.append(box)
        middle = (box.x0 + box.x1) / 2.0 - x, (box.y0 + box.y1) / 2.0 - y
        lead = {"shrinkA": 0, "shrinkB": 4} if radius > _LEADS_FROM else None
        _write(axes, label, (middle[0] / pixels, middle[1] / pixels), "offset points", lead,
               ha="center", multialignment="left")  # fmt: skip


def label_ends(axes: Axes, labels: Sequence[Label]) -> None:
    """Write each text right of ``axes``, near the height of its line's end, one above the other.

    The limits of ``axes`` must not change afterwards.
    """
    height = axes.bbox.height * 72.0 / axes.figure.dpi
    low, high = axes.get_ylim()
    ordered = sorted(labels, key=lambda label: label.y)
    heights = [
        (wrap(label.text).count("\n") + 1) * style.SMALL_POINTS * _LINE_SPACING for label in ordered
    ]
    wanted = [height * (label.y - low) / (high - low) for label in ordered]
    for label, middle in zip(ordered, spread_out(wanted, heights, height), strict=True):
        lead = {"shrinkA": 1, "shrinkB": 0, "relpos": (0.0, 0.5)}
        _write(axes, label, (1.06, middle / height), "axes fraction", lead)


def spread_out(wanted: Sequence[float], heights: Sequence[float], room: float) -> list[float]:
    """Return middles as near to ``wanted`` as they can be without overlapping.

    Texts that would overlap form a block around the mean of where they should be.

    ``wanted`` ascends; ``room`` begins at 0, and texts too high for it stick out at the top.
    """
    n = len(wanted)
    below = [sum(heights[:i]) for i in range(n)]
    # Where each text would begin, had all below it no height: these are not to fall.
    starts = [wanted[i] - heights[i] / 2.0 - below[i] for i in range(n)]
    means = {(i, j): statistics.fmean(starts[i : j + 1]) for i in range(n) for j in range(i, n)}
    rising = [max(min(means[i, j] for j in range(k, n)) for i in range(k + 1)) for k in range(n)]
    last = max(0.0, room - sum(heights))
    return [
        min(max(start, 0.0), last) + low + height / 2.0
        for start, low, height in zip(rising, below, heights, strict=True)
    ]


def _beside(x: float, y: float, distance: float, angle: float, width: float, height: float) -> Bbox:
    """Return the box of a text in one direction from a point."""
    dx, dy = math.cos(angle), math.sin(angle)
    left = x + distance * dx + (dx - 1.0) / 2.0 * width
    bottom = y + distance * dy + (dy - 1.0) / 2.0 * height
    return Bbox.from_bounds(left, bottom, width, height)


def _overlap(one: Bbox, other: Bbox) -> float:
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return float(max(0.0, width) * max(0.0, height))


def _write(
    axes: Axes, label: Label, at: tuple[float, float], units: Any, lead: Any, **more: Any
) -> None:
    """Write a text with its middle at ``at``, and a line to its point where ``lead`` has a form."""
    line = {"arrowstyle": "-", "color": label.color, "linewidth": 0.6}
    axes.annotate(
        wrap(label.text), (label.x, label.y), xytext=at, textcoords=units,
        fontsize=style.SMALL_POINTS, color=style.INK, va="center", annotation_clip=False,
        arrowprops=None if lead is None else {**line, **lead}, **more,
    )  # fmt: skip
