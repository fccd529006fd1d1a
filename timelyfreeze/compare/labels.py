"""Names beside points and at the ends of lines, where they cover nothing.

Whoever reads a plot need not go to and fro between it and a legend.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation
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
    """Write each text near its point, over neither points nor other texts if there is room.

    The limits of ``axes`` must not change afterwards.

    Args:
        axes: Where the points are.
        labels: Their names.
        bars: What else is not to be written over, upright or level, in the units of the axes.
    """
    renderer = FigureCanvasAgg(axes.figure).get_renderer()
    pixels = axes.figure.dpi / 72.0
    places = [axes.transData.transform((label.x, label.y)) for label in labels]
    taken = [Bbox([[x - 6, y - 6], [x + 6, y + 6]]) for x, y in places]
    for start, end in bars:
        (x0, y0), (x1, y1) = sorted(map(tuple, axes.transData.transform([start, end])))
        taken.append(Bbox([[x0 - 1, min(y0, y1) - 1], [x1 + 1, max(y0, y1) + 1]]))
    inside = axes.get_window_extent(renderer)
    for label, (x, y) in zip(labels, places, strict=True):
        probe = axes.text(0, 0, wrap(label.text), fontsize=style.SMALL_POINTS)
        size = probe.get_window_extent(renderer)
        probe.remove()
        options = []
        for radius, angle in itertools.product(_RADII, _DIRECTIONS):
            box = _beside(x, y, radius * pixels, angle, size.width, size.height)
            # Any overlap is worse than being farther away.
            over = sum(_overlap(box, other) for other in taken) + _outside(box, inside)
            cost = _OVERLAP * (over > 0.0) + 2.0 * over
            options.append((cost + radius * pixels, radius, box))
        _, radius, box = min(options, key=lambda option: option[0])
        taken.append(box)
        _write(axes, label, box, pixels, is_far=radius > _LEADS_FROM)


def label_ends(axes: Axes, labels: Sequence[Label]) -> None:
    """Write each text right of ``axes``, near the height of its line's end, one above the other.

    The limits of ``axes`` must not change afterwards.
    """
    if not labels:
        return
    height = axes.get_position().height * axes.figure.get_figheight() * 72.0
    low, high = axes.get_ylim()
    ordered = sorted(labels, key=lambda label: label.y)
    heights = [
        (wrap(label.text).count("\n") + 1) * style.SMALL_POINTS * _LINE_SPACING for label in ordered
    ]
    wanted = [height * (label.y - low) / (high - low) for label in ordered]
    for label, place in zip(ordered, spread_out(wanted, heights, height), strict=True):
        axes.annotate(
            wrap(label.text),
            xy=(label.x, label.y),
            xytext=(1.06, place / height),
            textcoords="axes fraction",
            fontsize=style.SMALL_POINTS,
            color=style.INK,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "color": label.color, "linewidth": 0.6, "shrinkA": 1,
                "shrinkB": 0, "relpos": (0.0, 0.5),
            },
        )  # fmt: skip


def spread_out(wanted: Sequence[float], heights: Sequence[float], room: float) -> list[float]:
    """Return middles as near to ``wanted`` as they can be without overlapping.

    Texts that would overlap form a block around the mean of where they should be.

    Args:
        wanted: Middles in ascending order.
        heights: Of the texts.
        room: From 0 to here is room; a block too large for it sticks out at the top.
    """

    def start(block: Sequence[int]) -> float:
        """Return where a block starts whose texts are on average where they should be."""
        offsets = itertools.accumulate((heights[i] for i in block), initial=0.0)
        starts = [wanted[i] - heights[i] / 2.0 - at for i, at in zip(block, offsets, strict=False)]
        return max(0.0, min(sum(starts) / len(starts), room - size(block)))

    def size(block: Sequence[int]) -> float:
        return sum(heights[i] for i in block)

    blocks: list[list[int]] = []
    for i in range(len(wanted)):
        blocks.append([i])
        while len(blocks) > 1 and start(blocks[-2]) + size(blocks[-2]) > start(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    middles = []
    for block in blocks:
        ends = itertools.accumulate((heights[i] for i in block), initial=start(block))
        middles += [end + heights[i] / 2.0 for i, end in zip(block, ends, strict=False)]
    return middles


def _beside(x: float, y: float, distance: float, angle: float, width: float, height: float) -> Bbox:
    """Return the box of a text in one direction from a point."""
    dx, dy = math.cos(angle), math.sin(angle)
    left = x + distance * dx + (dx - 1.0) / 2.0 * width
    bottom = y + distance * dy + (dy - 1.0) / 2.0 * height
    return Bbox.from_bounds(left, bottom, width, height)


def _overlap(one: Bbox, other: Bbox) -> float:
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return max(0.0, width) * max(0.0, height)


def _outside(box: Bbox, inside: Bbox) -> float:
    return box.width * box.height - _overlap(box, inside)


def _write(axes: Axes, label: Label, box: Bbox, pixels: float, *, is_far: bool) -> Annotation:
    x, y = axes.transData.transform((label.x, label.y))
    middle = ((box.x0 + box.x1) / 2.0, (box.y0 + box.y1) / 2.0)
    return axes.annotate(
        wrap(label.text),
        xy=(label.x, label.y),
        xytext=((middle[0] - x) / pixels, (middle[1] - y) / pixels),
        textcoords="offset points",
        fontsize=style.SMALL_POINTS,
        color=style.INK,
        ha="center",
        va="center",
        multialignment="left",
        annotation_clip=False,
        arrowprops=(
            {"arrowstyle": "-", "color": label.color, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
            if is_far
            else None
        ),
    )
