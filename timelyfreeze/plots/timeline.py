"""The plot of batches: a lane for each rank, a block for each action (Figs. 7 to 13)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from timelyfreeze.plots.style import BLACK, FAINT_INK, LANE, TITLE_POINTS, house_style
from timelyfreeze.plots.timeline_batch import (
    COLORS,
    FOOT_COLOR,
    OUTLINE,
    draw_batch,
    stage_places,
    tint,
)
from timelyfreeze.records import FRONT_READ, KIND_WORDS, UNFROZEN, Timeline
from timelyfreeze.schedule import ActionKind

_LANES_INCHES = 10.0  # of all lanes together, so that many batches still make one picture
_LEAST_SEEN = 1e-3  # of the batch: under a pixel or so
_LONG_NAME = 70  # more letters have a line of their own
_LINE_INCHES = 0.18


def timeline_figure(
    timelines: Sequence[Timeline], title: str = "", names: Sequence[str] = ()
) -> Figure:
    """Draw batches one below the other on one time axis.

    Blocks carry the number of their microbatch where they are wide enough. The paler a backward,
    the more of it is frozen. Where ranks hold several stages, a bar at the foot of a block says
    which of them, the first having none. The critical path is outlined.

    Args:
        timelines: The batch without freezing first, if there is one: later ones are compared with
            it.
        title: Stands above all, such as the schedule.
        names: Of the batches, such as the methods that made them; none for what they are
            examples of.

    Raises:
        ValueError: If there is nothing to draw, or another number of names than of batches.
    """
    if not timelines:
        raise ValueError("no timeline is given; there is nothing to draw")
    if names and len(names) != len(timelines):
        raise ValueError(f"{len(names)} names are given for {len(timelines)} timelines")
    with house_style():
        return _draw(timelines, title, names or [""] * len(timelines))


def _draw(timelines: Sequence[Timeline], title: str, names: Sequence[str]) -> Figure:
    ranks = [timeline.n_ranks for timeline in timelines]
    n_lanes = max(ranks)
    lane_inches = min(0.42, max(0.2, min(3.4, _LANES_INCHES / len(timelines)) / n_lanes))
    width = _figure_width(timelines)
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
            ax.axvline(reference.batch_ms, **_END_STYLE, zorder=0)
    axes[-1].set_xlabel("time since the batch began (ms)")
    axes[-1].set_xlim(0.0, longest_ms * 1.002)
    if title:
        figure.suptitle(title, fontsize=TITLE_POINTS, fontweight="bold", x=0.01, ha="left")
    _add_legend(figure, timelines)
    return figure


_END_STYLE: Any = {"color": FAINT_INK, "linewidth": 1.0, "linestyle": (0, (4, 3))}


def _figure_width(timelines: Sequence[Timeline]) -> float:
    """Return inches: as wide as the numbers in a rank's blocks ask for, within reason."""
    most = max(len(lane) for timeline in timelines for lane in timeline.lanes)
    return float(np.clip(2.0 + 0.32 * most, 10.0, 16.0))


def batch_title(timeline: Timeline, reference: Timeline | None, name: str = "") -> str:
    """Return what stands above a batch: its name or what it is, its time and its bubbles.

    The first one has no ``reference``; others are compared with it.
    """
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
    entries.append((Patch(color=LANE), "idle"))
    n_unseen = sum(
        block.action.kind.freezable and block.end_ms - block.start_ms < _LEAST_SEEN * t.batch_ms
        for t in timelines
        for block in t.ran
    )
    if n_unseen:
        nothing = Patch(facecolor="none", edgecolor="none")
        entries.append((nothing, f"too short to see: {n_unseen} backwards with nothing to do"))
    outline = Patch(facecolor="none", edgecolor=BLACK, linewidth=OUTLINE)
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
        ncols=min(len(entries), 6 if figure.get_figwidth() < 12 else 9),
        columnspacing=1.4,
        handlelength=1.8,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0.0)},
    )
