"""Freeze ratio and throughput over the steps of a run: Fig. 4 of arXiv:2602.05754."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from timelyfreeze.plots.phases import bands, draw_by_phase, shade_phases
from timelyfreeze.plots.style import BLUE, FAINT_INK, INK, WIDTH_INCHES, house_style
from timelyfreeze.records import StepRow

_WINDOW = 7


def curves_figure(
    rows: Sequence[StepRow], title: str = "", n_emulated: int = 1, unit: str = "tokens"
) -> Figure:
    """Draw how much each step froze and how fast it was.

    Of an emulation, steps are those of the virtual clock. Throughput is drawn pale step by step,
    and as the median of ``_WINDOW`` steps of a phase, so that single steps do not hide the course.

    Args:
        rows: The steps.
        title: Stands above.
        n_emulated: Ranks that one process emulated, each a device by the virtual clock.
        unit: What throughput counts.

    Raises:
        ValueError: If there is no step.
    """
    if not rows:
        raise ValueError("steps.csv has no step yet; there is nothing to draw")
    with house_style():
        figure = Figure(figsize=(WIDTH_INCHES, 3.6), layout="constrained")
        below = figure.subplots()
        shade_phases(below, rows)
        above = below.twinx()
        _draw_ratio(above, rows)
        _draw_speed(below, rows, n_emulated, unit)
        below.set_xlabel("optimizer step")
        below.set_title(title, loc="left", pad=28 if bands(rows) else 8)
        figure.legend(loc="outside lower center", ncols=3)
    return figure


def speeds(rows: Sequence[StepRow], n_emulated: int = 1) -> list[float]:
    """Return throughput per device of each step, by the virtual clock where there is one."""
    return [
        row.tokens_per_second * row.step_ms / row.virtual_step_ms / n_emulated
        if row.virtual_step_ms
        else row.tokens_per_second
        for row in rows
    ]


def running_medians(rows: Sequence[StepRow], values: Sequence[float]) -> list[float]:
    """Return for each step the median of the steps around it that are of its phase."""
    half = _WINDOW // 2
    return [
        statistics.median(
            values[j]
            for j in range(max(0, i - half), min(len(rows), i + half + 1))
            if rows[j].phase == row.phase
        )
        for i, row in enumerate(rows)
    ]


def _draw_speed(axes: Axes, rows: Sequence[StepRow], n_emulated: int, unit: str) -> None:
    steps = [row.step for row in rows]
    values = speeds(rows, n_emulated)
    axes.plot(steps, values, color=FAINT_INK, lw=0.6, alpha=0.5)
    label = f"throughput, median of {_WINDOW} steps (left)"
    draw_by_phase(axes, rows, running_medians(rows, values), color=INK, lw=1.8, label=label)
    is_virtual = any(row.virtual_step_ms is not None for row in rows)
    axes.set_ylabel(f"{unit}/s per device" + (", virtual clock" if is_virtual else ""))
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")


def _draw_ratio(axes: Axes, rows: Sequence[StepRow]) -> None:
    ratios = [row.freeze_ratio for row in rows]
    label = "fraction of all elements that the step froze (right)"
    draw_by_phase(axes, rows, ratios, color=BLUE, lw=1.8, label=label)
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("freeze ratio", color=BLUE)
    axes.tick_params(axis="y", labelcolor=BLUE)
    axes.spines["right"].set(visible=True, color=BLUE)
