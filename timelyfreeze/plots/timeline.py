"""The plot of batches: a lane per rank, a block per action (Figs. 7 to 13)."""

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from numpy.typing import NDArray

from timelyfreeze.plots import style
from timelyfreeze.records.timeline import FRONT_READ, KIND_WORDS, UNFROZEN, Block, Timeline
from timelyfreeze.schedule import ActionKind

_LANES_INCHES = 10.0  # of all lanes together, so that many batches still make one picture
_LEAST_SEEN = 1e-3  # of the batch: under a pixel or so
_LONG_NAME = 70  # more letters have a line of their own
_LINE_INCHES = 0.18
_LETTERS = 13.0  # of a legend, in an inch
_HANDLE = 7  # letters that are as wide as a legend's handle and the space around


@style.house_style()
def timeline_figure(
    timelines: Sequence[Timeline], title: str = "", names: Sequence[str] = ()
) -> Figure:
    """Draw batches one below the other on a common time axis.

    Blocks carry the number of their microbatch where they are wide enough. Frozen parts make a
    backward paler. With several stages per rank, a bar at the foot of a block gives the stage,
    without a bar for the first. The critical path is outlined.
    """
    names = names or [""] * len(timelines)
    ranks = [timeline.n_ranks for timeline in timelines]
    n_lanes = max(ranks)
    lane_inches = min(0.42, max(0.2, min(3.4, _LANES_INCHES / len(timelines)) / n_lanes))
    # As wide as the numbers in a rank's blocks ask for, within reason.
    most = max(len(lane) for timeline in timelines for lane in timeline.lanes)
    width = float(np.clip(2.0 + 0.32 * most, 10.0, 16.0))
    n_long = sum(len(name) > _LONG_NAME for name in names)
    height = 1.15 + 0.42 * len(timelines) + sum(ranks) * lane_inches + n_long * _LINE_INCHES
    layout = ConstrainedLayoutEngine(h_pad=0.06, hspace=0.04)
    figure = Figure(figsize=(width, height), layout=layout)
    rows = figure.subplots(len(ranks), 1, sharex=True, squeeze=False, height_ratios=ranks)
    axes = rows[:, 0]
    longest_ms = max(timeline.batch_ms for timeline in timelines) or 1.0
    points_per_ms = 72.0 * (width - 1.6) / longest_ms
    reference = timelines[0] if timelines[0].phase in UNFROZEN else None
    for row, (timeline, ax, name) in enumerate(zip(timelines, axes, names, strict=True)):
        draw_batch(ax, timeline, lane_inches, points_per_ms)
        ax.set_title(batch_title(timeline, reference if row else None, name), loc="left")
        if row and reference is not None:
            ax.axvline(reference.batch_ms, **_END_STYLE, zorder=6)
    axes[-1].set_xlabel("time since the batch began (ms)")
    axes[-1].set_xlim(0.0, longest_ms * 1.002)
    if title:
        figure.suptitle(title, fontsize=style.TITLE_POINTS, fontweight="bold", x=0.01, ha="left")
    _add_legend(figure, timelines)
    return figure


_END_STYLE: Any = {"color": style.INK, "linewidth": 1.0, "linestyle": (0, (4, 3))}


def batch_title(timeline: Timeline, reference: Timeline | None, name: str = "") -> str:
    """Return a batch's title: name, time, bubbles, and the gain over a reference."""
    text = name or f"{timeline.origin.capitalize()}, {timeline.words}"
    if name and timeline.entry_stage is not None:
        text += f", {FRONT_READ}"
    text += ":\n" if len(text) > _LONG_NAME else ": "
    text += f"batch {timeline.batch_ms:.4g} ms"
    if reference is not None and timeline.batch_ms > 0.0:
        text += f" ({100 * (reference.batch_ms / timeline.batch_ms - 1):+.1f}% throughput)"
    return f"{text}, bubbles {100 * timeline.bubble:.1f}%"


def _add_legend(figure: Figure, timelines: Sequence[Timeline]) -> None:
    entries: list[tuple[Any, str]] = []
    kinds = {block.action.kind for timeline in timelines for block in timeline.ran}
    for kind in ActionKind:
        if kind in kinds:
            entries.append((Patch(color=COLORS[kind]), f"{kind.value}: {KIND_WORDS[kind]}"))
    if any(block.freeze_ratio > 0.0 for timeline in timelines for block in timeline.ran):
        kind = next(kind for kind in ActionKind if kind.freezable and kind in kinds)
        tints = tuple(Patch(color=tint(kind, ratio)) for ratio in (0.0, 0.5, 1.0))
        entries.append((tints, "0, 50, 100% frozen"))
    entries.append((Patch(color=style.LANE), "idle"))
    n_unseen = sum(
        block.action.kind.freezable and block.end_ms - block.start_ms < _LEAST_SEEN * t.batch_ms
        for t in timelines
        for block in t.ran
    )
    if n_unseen:
        nothing = Patch(facecolor="none", edgecolor="none")
        entries.append((nothing, f"too short to see: {n_unseen} backwards with nothing to do"))
    outline = Patch(facecolor="none", edgecolor=style.BLACK, linewidth=OUTLINE)
    entries.append((outline, "critical path"))
    n_places = 1 + max(place for t in timelines for place in stage_places(t).values())
    if n_places > 1:
        which = "second" if n_places == 2 else "later"
        bar = Line2D([], [], color=FOOT_COLOR, linewidth=3.5)
        entries.append((bar, f"foot bar: {which} stage of its rank"))
    if len(timelines) > 1 and timelines[0].phase in UNFROZEN:
        end = Line2D([], [], **_END_STYLE)
        entries.append((end, f"end {timelines[0].words}"))
    figure.legend(
        *zip(*entries, strict=True),
        loc="outside lower center",
        ncols=_columns([text for _, text in entries], _LETTERS * figure.get_figwidth()),
        columnspacing=1.4,
        handlelength=1.8,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.0)},
    )


def _columns(texts: Sequence[str], room: float) -> int:
    """Return the largest number of legend columns with room, by counted letters."""
    for n in range(len(texts), 1, -1):
        widths = [max(map(len, column)) for column in np.array_split(np.array(texts), n)]
        if sum(widths) + _HANDLE * n <= room:
            return n
    return 1


COLORS = {
    ActionKind.FORWARD: style.SKY,
    ActionKind.FULL_BACKWARD: style.VERMILLION,
    ActionKind.INPUT_BACKWARD: style.YELLOW,
    ActionKind.WEIGHT_BACKWARD: style.PURPLE,
}
# Weight gradients fill gaps; they are lower than the rest, which tells them apart in grey too.
_HEIGHTS = {ActionKind.WEIGHT_BACKWARD: 0.62}
_LANE_HEIGHT = 0.86
# A block with everything frozen keeps this much of its colour.
_LEAST_COLOR = 0.2
# More tints cannot be told apart, and all blocks of one tint are one path in the file.
_TINTS = 20
_FOOT_HEIGHT = 0.2
FOOT_COLOR = "#3A3A3A"
OUTLINE = 1.3
_DIGIT_WIDTH = 0.62  # in font sizes
_LEAST_POINTS = 5.0


def draw_batch(ax: Axes, timeline: Timeline, lane_inches: float, points_per_ms: float) -> None:
    """Draw a batch into axes whose lanes are so high, at so many points a millisecond."""
    n, batch_ms = timeline.n_ranks, timeline.batch_ms
    lanes = [_box(0.0, batch_ms, rank, _LANE_HEIGHT) for rank in range(n)]
    _add_boxes(ax, lanes, facecolor=style.LANE, edgecolor="none", zorder=1)
    by_tint: dict[tuple[float, float, float], list[Block]] = {}
    for block in timeline.ran:
        by_tint.setdefault(tint(block.action.kind, block.freeze_ratio), []).append(block)
    for color, blocks in by_tint.items():
        boxes = [_box(b.start_ms, b.end_ms, b.rank, _height(b)) for b in blocks]
        _add_boxes(ax, boxes, facecolor=color, edgecolor="white", linewidth=0.3, zorder=2)
    _add_boxes(ax, _foot_bars(timeline), facecolor=FOOT_COLOR, edgecolor="none", zorder=3)
    _draw_critical_path(ax, timeline)
    _draw_numbers(ax, timeline, lane_inches, points_per_ms)
    for rank in set(range(n)) - {block.rank for block in timeline.ran}:
        told, at = f"nothing of this batch runs: {FRONT_READ}", (batch_ms / 2, float(rank))
        style.annotate(ax, told, at, "data", ha="center", va="center")
    ax.set_ylim(n - 0.5, -0.5)
    ax.set_yticks(range(n), [f"rank {rank}" for rank in range(n)])
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    for rank, fraction in enumerate(timeline.rank_bubbles):
        place, idle = ("axes fraction", "data"), f"{100 * fraction:.0f}% idle"
        style.annotate(ax, idle, (1.0, rank), place, shift=(4, 0), va="center")


def _box(start_ms: float, end_ms: float, rank: float, height: float) -> NDArray[np.float64]:
    top, bottom = rank - height / 2, rank + height / 2
    corners = [(start_ms, top), (end_ms, top), (end_ms, bottom), (start_ms, bottom)]
    return np.array([*corners, corners[0]])


def _add_boxes(ax: Axes, boxes: Sequence[NDArray[np.float64]], **look: Any) -> None:
    """Draw boxes of a look as a single path, for much smaller files."""
    if not boxes:
        return
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes)
    ax.add_patch(PathPatch(Path(np.concatenate(boxes), codes), **look))


def _height(block: Block) -> float:
    return _LANE_HEIGHT * _HEIGHTS.get(block.action.kind, 1.0)


def tint(kind: ActionKind, freeze_ratio: float) -> tuple[float, float, float]:
    """Return a colour in [0, 1]: the kind's, mixed with white as far as the action is frozen."""
    frozen = round(freeze_ratio * _TINTS) / _TINTS
    strength = 1.0 - (1.0 - _LEAST_COLOR) * frozen
    red, green, blue = (1.0 - strength * (1.0 - part) for part in to_rgb(COLORS[kind]))
    return red, green, blue


def stage_places(timeline: Timeline) -> dict[int, int]:
    """Return each stage's position on its rank, from 0."""
    stages: dict[int, list[int]] = {}
    for stage, rank in enumerate(timeline.order.stage_to_rank):
        stages.setdefault(rank, []).append(stage)
    return {stage: place for held in stages.values() for place, stage in enumerate(held)}


def _foot_bars(timeline: Timeline) -> list[NDArray[np.float64]]:
    """Return a bar at the foot of all blocks of later stages of a rank."""
    places = stage_places(timeline)
    most = max(places.values())
    bars = []
    for block in timeline.ran:
        place = places[block.action.stage]
        if place:
            height = _LANE_HEIGHT * _FOOT_HEIGHT * (1.0 if most == 1 else 2.0 * place / most)
            foot = block.rank + _height(block) / 2
            bars.append(_box(block.start_ms, block.end_ms, foot - height / 2, height))
    return bars


def _draw_critical_path(ax: Axes, timeline: Timeline) -> None:
    """Outline the path's stretches on ranks, and join the stretches."""
    path = [block for block in timeline.ran if block.is_critical]
    path.sort(key=lambda block: (block.end_ms, block.start_ms))
    stretches = [list(stretch) for _, stretch in groupby(path, key=lambda block: block.rank)]
    boxes = [_box(s[0].start_ms, s[-1].end_ms, s[0].rank, _LANE_HEIGHT) for s in stretches]
    look: Any = {"facecolor": "none", "edgecolor": style.BLACK, "linewidth": OUTLINE}
    _add_boxes(ax, boxes, **look, joinstyle="miter", zorder=4)
    lines = []
    for before, after in pairwise(stretches):
        down = np.sign(after[0].rank - before[0].rank) * _LANE_HEIGHT / 2
        lines.append(
            [(before[-1].end_ms, before[0].rank + down), (after[0].start_ms, after[0].rank - down)]
        )
    ax.add_collection(LineCollection(lines, colors=style.BLACK, linewidths=OUTLINE, zorder=4))


def _draw_numbers(ax: Axes, timeline: Timeline, lane_inches: float, points_per_ms: float) -> None:
    points = min(style.TEXT_POINTS, 0.5 * 72.0 * lane_inches)
    rise = _LANE_HEIGHT * _FOOT_HEIGHT / 2 if max(stage_places(timeline).values()) else 0.0
    look: Any = {"ha": "center", "va": "center_baseline", "color": style.INK, "zorder": 5}
    for kind in ActionKind:
        blocks = [block for block in timeline.ran if block.action.kind is kind]
        widths = (_DIGIT_WIDTH * len(str(block.action.microbatch)) + 0.3 for block in blocks)
        sizes = [b.duration_ms * points_per_ms / w for b, w in zip(blocks, widths, strict=True)]
        sized = [(b, round(s, 1)) for b, s in zip(blocks, sizes, strict=True) if s >= _LEAST_POINTS]
        # Where they are less than half of what there is, the few numbers left would only be noise.
        # By time and not by count: backwards that a plan leaves out altogether take next to none.
        if 2.0 * sum(block.duration_ms for block, _ in sized) <= sum(b.duration_ms for b in blocks):
            continue
        for block, size in sized:
            x, text = (block.start_ms + block.end_ms) / 2, str(block.action.microbatch)
            ax.text(x, block.rank - rise, text, fontsize=min(points, size), clip_on=True, **look)
