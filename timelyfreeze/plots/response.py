"""Backward time against freeze ratio, stage by stage: Fig. 15 of arXiv:2602.05754."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from timelyfreeze.plots import style
from timelyfreeze.records.tables import FrozenCount, ResponseRow
from timelyfreeze.settings import ALL_OR_NOTHING

_LATE_TINT, _EARLY_TINT = 0.9, 0.2
_SHOWN_SHARE, _HEADROOM = 0.98, 1.15
_PROFILE = "profile"
_MEASURED = ("upper_bound", "lower_bound", "mixed")


# What a plan takes a backward to be: a line between its median times, unfrozen and frozen.
AssumedLine = tuple[float, float]


def assumed_lines(rows: Sequence[ResponseRow]) -> dict[str, AssumedLine]:
    """Return the lines between nothing and everything frozen.

    Keys are ways of freezing: named in a profile for the first stage, "" elsewhere. A way with an
    unmeasured end is left out.
    """
    ways: dict[str, list[ResponseRow]] = {}
    for row in rows:
        if row.phase in _MEASURED:
            ways.setdefault("", []).append(row)
        elif row.phase.startswith(_PROFILE):
            ways.setdefault(row.phase.removeprefix(_PROFILE).strip(), []).append(row)
    lines: dict[str, AssumedLine] = {}
    for way, measured in ways.items():
        unfrozen, frozen = (
            [row.duration_ms for row in measured if row.fraction == fraction and not row.cut]
            for fraction in (0.0, 1.0)
        )
        if unfrozen and frozen:
            lines[way] = statistics.median(unfrozen), statistics.median(frozen)
    return lines


def response_figure(rows: Sequence[ResponseRow], title: str = "") -> Figure:
    """Draw the times of backwards against their frozen fraction, and the plan's assumption."""
    stages = sorted({row.stage for row in rows})
    with style.house_style():
        figure, drawn = style.panels(
            [f"stage {stage}" for stage in stages], 2.4, title,
            x_label="frozen fraction of the stage", y_label="backward, ms", sharey=False,
        )  # fmt: skip
        handles: dict[str, Artist] = {}
        for panel, stage in zip(drawn, stages, strict=True):
            _draw_stage(panel, [row for row in rows if row.stage == stage])
            artists, labels = panel.get_legend_handles_labels()
            handles |= dict(zip(labels, artists, strict=True))
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles))
    return figure


def _draw_stage(axes: Axes, rows: Sequence[ResponseRow]) -> None:
    last = max(row.microbatch for row in rows)
    for kind, color, marker, word in (
        ("B", style.BLUE, "o", "backward"),
        ("W", style.ORANGE, "s", "weight half of a backward"),
    ):
        of_kind = [row for row in rows if row.kind == kind]
        if not of_kind:
            continue
        whole = [row for row in of_kind if not row.cut]
        cut = [row for row in of_kind if row.cut]
        # No edges: hundreds of points lie close together.
        colors = [to_rgba(color, _tint(row.microbatch, last)) for row in whole]
        axes.scatter(*_points(whole), s=9, c=colors, marker=marker, linewidths=0)
        axes.plot([], [], color=color, marker=marker, ms=4, lw=0, label=word)
        if cut:
            needless = "without an input gradient, which nobody needs"
            axes.plot(*_points(cut), color=style.FAINT_INK, marker="x", ms=4, mew=0.8, lw=0,
                      label=needless)  # fmt: skip
        for way, ends_ms in assumed_lines(of_kind).items():
            # The way that is the default is no news.
            is_other = way not in ("", ALL_OR_NOTHING)
            label = "what a plan assumes" + (f", {way}" if is_other else "")
            dashes: Any = (0, (4, 2)) if is_other else "-"
            axes.plot([0, 1], ends_ms, color=style.VERMILLION, lw=1.6, ls=dashes, label=label)
    _leave_out_outliers(axes, [row.duration_ms for row in rows])
    axes.set_xlim(-0.04, 1.04)
    axes.grid(axis="y")


def _points(rows: Sequence[ResponseRow]) -> tuple[list[float], list[float]]:
    return [row.fraction for row in rows], [row.duration_ms for row in rows]


def _tint(microbatch: int, last: int) -> float:
    """Return a microbatch's shade; unknown numbers get the middle."""
    if microbatch < 0 or last < 1:
        return 0.6
    return _EARLY_TINT + (_LATE_TINT - _EARLY_TINT) * microbatch / last


def _leave_out_outliers(axes: Axes, times_ms: Sequence[float]) -> None:
    """Let the axis end where nearly all points do, and say how many lie beyond."""
    times_ms = [time_ms for time_ms in times_ms if math.isfinite(time_ms)]
    if not times_ms:
        return  # a clock misread each time
    top_ms = _HEADROOM * float(np.quantile(times_ms, _SHOWN_SHARE))
    beyond = sum(time_ms > top_ms for time_ms in times_ms)
    axes.set_ylim(0, top_ms if top_ms > 0.0 else None)
    if beyond:
        style.annotate(axes, f"{beyond} slower", (1.0, 1.0), "axes fraction", ha="right", va="top")


_BINS = 25


def histogram_figure(counts: Sequence[FrozenCount], title: str = "") -> Figure:
    """Draw by rank a histogram of tensors by how often frozen."""
    counts = [count for count in counts if count.backwards]
    ranks = sorted({count.rank for count in counts})
    of_ranks = [[count for count in counts if count.rank == rank] for rank in ranks]
    return frequencies_figure([f"rank {rank}" for rank in ranks], of_ranks, title)


def frequencies_figure(
    names: Sequence[str], parts: Sequence[Sequence[FrozenCount]], title: str = ""
) -> Figure:
    """Draw a histogram of tensors by how often frozen, a panel per part."""
    names = [f"{name}: {len(part)} tensors" for name, part in zip(names, parts, strict=True)]
    with style.house_style():
        figure, drawn = style.panels(
            names, 2.1, title,
            x_label="backwards that left it out", y_label="tensors", sharey=True,
        )  # fmt: skip
        for panel, of_rank in zip(drawn, parts, strict=True):
            frequencies = [count.frequency for count in of_rank]
            panel.hist(
                frequencies, bins=np.linspace(0, 1, _BINS + 1).tolist(),
                weights=np.full(len(of_rank), 1 / len(of_rank)), color=style.BLUE,
                edgecolor="white", linewidth=0.4, label="fraction of the rank's tensors",
            )  # fmt: skip
            mean = mean_frequency(of_rank)
            panel.axvline(mean, color=style.VERMILLION, lw=1.4, label="mean over elements")
            panel.set_xlim(0, 1)
            panel.xaxis.set_major_formatter("{x:.0%}")
            panel.yaxis.set_major_formatter("{x:.0%}")
        handles = drawn[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=2)
    return figure


def mean_frequency(counts: Sequence[FrozenCount]) -> float:
    """Return the fraction of backwards without an element, mean over elements."""
    sizes = np.array([count.elements for count in counts], dtype=float)
    return float(np.average([count.frequency for count in counts], weights=sizes))
