"""Freeze ratio and throughput over the steps of a run: Fig. 4 of arXiv:2602.05754."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from timelyfreeze.plots.style import (
    BLUE,
    FAINT_INK,
    INK,
    ORANGE,
    SMALL_POINTS,
    VERMILLION,
    WIDTH_INCHES,
    annotate,
    house_style,
)
from timelyfreeze.records import WINDOW, LossRow, StepRow, kappa_over_p_eff, running_means
from timelyfreeze.settings import FREEZING_PHASES, Phase

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


_FREEZING = {phase.value for phase in FREEZING_PHASES}


def convergence_figure(rows: Sequence[StepRow], title: str = "") -> Figure:
    """Draw what a step of a run costs, what it updates, and the ratio of the two.

    The ratio is the paper's; the report's time to a loss is estimated otherwise.

    Raises:
        ValueError: If neither of the two was measured.
    """
    kappa = [row.kappa for row in rows]
    p_eff = [row.p_eff for row in rows]
    # Before freezing begins, and while everything is frozen to measure, the two say nothing.
    ratios = [
        kappa_over_p_eff(row.kappa, row.p_eff) if row.phase in _FREEZING else None for row in rows
    ]
    known = [ratio for ratio in ratios if ratio is not None and math.isfinite(ratio)]
    if all(value is None for value in (*kappa, *p_eff)):
        raise ValueError("steps.csv has neither kappa nor p_eff; there is nothing to draw")
    with house_style():
        figure = Figure(figsize=(WIDTH_INCHES, 4.8), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        shade_phases(above, rows)
        shade_phases(below, rows, named=False)
        for axes, values, label, color, marker in (
            (above, kappa, "kappa: time of a step", BLUE, "o"),
            (above, p_eff, "p_eff: gradient energy that is updated", ORANGE, "s"),
            (below, ratios, "kappa / p_eff, of arXiv:2602.05754", VERMILLION, "D"),
        ):
            draw_by_phase(axes, rows, values, label=label, color=color, marker=marker, ms=3, lw=1.4)
        above.set_ylim(bottom=0)
        above.set_ylabel("fraction of the\nunfrozen step")
        below.axhline(1.0, color=INK, lw=0.9, ls=(0, (4, 3)))
        below.set_ylim(bottom=0, top=max([1.4, *(1.08 * ratio for ratio in known)]))
        below.set_ylabel("of the run\nwithout freezing")
        below.set_xlabel("optimizer step")
        for axes in (above, below):
            axes.grid(axis="y")
        above.set_title(title, loc="left", pad=28)
        figure.legend(loc="outside lower center", ncols=3)
    return figure


def loss_figure(rows: Sequence[LossRow], title: str = "") -> Figure:
    """Draw the losses of a run against steps and against seconds.

    Training losses are drawn pale as they were logged, and as their running mean, which is what
    times to a loss are taken from. Validation losses are points.

    Args:
        rows: Its losses, in the order in which they were written.
        title: Stands above.

    Raises:
        ValueError: If the run has no loss.
    """
    if not rows:
        raise ValueError("losses.csv has no loss yet; there is nothing to draw")
    trained = [(row, row.train_loss) for row in rows if row.train_loss is not None]
    validated = [(row, row.validation_loss) for row in rows if row.validation_loss is not None]
    losses = [loss for _, loss in trained]
    window = WINDOW if len(losses) >= 2 * WINDOW else 1
    label = "this run: training" + (f", mean of {window} logged" if window > 1 else "")
    with house_style():
        figure = Figure(figsize=(WIDTH_INCHES, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, place in ((left, "step"), (right, "seconds")):
            ends = [float(getattr(row, place)) for row, _ in trained]
            if window > 1:
                axes.plot(ends, losses, color=BLUE, lw=0.7, alpha=0.35)
            axes.plot(ends[window - 1 :], running_means(losses, window),
                      color=BLUE, lw=1.8, label=label)  # fmt: skip
            if validated:
                at = [float(getattr(row, place)) for row, _ in validated]
                axes.plot(at, [loss for _, loss in validated], color=BLUE, marker="o", ms=4, lw=0,
                          mec=FAINT_INK, mew=0.5, label="this run: validation")  # fmt: skip
            axes.grid(axis="y")
            axes.set_xlim(left=0)
        left.set(xlabel="optimizer step", ylabel="loss")
        right.set(xlabel="seconds of training")
        figure.suptitle(title, x=0.01, ha="left")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


# Of a name above the axes, on average, were the axes as wide as the figure.
_LETTER_INCHES = 0.65 * SMALL_POINTS / 72

# The shade behind each phase, and its name: short, to fit over a narrow band.
_LOOKS = {
    Phase.WARMUP: ("#FFFFFF", "warm-up"),
    Phase.UPPER_BOUND: ("#F1F1F1", "nothing\nfrozen"),
    Phase.LOWER_BOUND: ("#E2E2E2", "all\nfrozen"),
    Phase.MIXED: ("#EAEAEA", "monitoring"),
    Phase.RAMP: ("#F6F6F6", "ramp"),
    Phase.STABLE: ("#FFFFFF", "stable"),
    Phase.OFF: ("#EAEAEA", "off"),
}


class StepOfPhase(Protocol):
    """A row of a file that has one for each step."""

    @property
    def step(self) -> int:
        """Number of the optimizer step."""

    @property
    def phase(self) -> str:
        """Name of its phase; "" for a run without freezing."""


class Band(NamedTuple):
    """A phase with its first and its last step."""

    phase: Phase
    first: int
    last: int


def bands(rows: Sequence[StepOfPhase]) -> list[Band]:
    """Return the phases of a run in order; empty for one without freezing."""
    found = []
    for name, group in groupby(rows, key=lambda row: row.phase):
        steps = [row.step for row in group]
        if name:
            found.append(Band(Phase(name), steps[0], steps[-1]))
    return found


def draw_by_phase(
    axes: Axes,
    rows: Sequence[StepOfPhase],
    values: Sequence[float | None],
    *,
    label: str,
    **look: Any,
) -> None:
    """Draw a curve over steps that breaks where a phase ends: what follows is another regime.

    Args:
        axes: With steps along the x axis.
        rows: Steps of the run.
        values: One for each; steps without one are passed over.
        label: For the legend.
        look: As for ``Axes.plot``.
    """
    pairs = zip(rows, values, strict=True)
    for _, group in groupby(pairs, key=lambda pair: pair[0].phase):
        known = [(row.step, value) for row, value in group if value is not None]
        if known:
            steps, heights = zip(*known, strict=True)
            axes.plot(steps, heights, label=label, **look)
            label = "_"  # once in the legend


def shade_phases(axes: Axes, rows: Sequence[StepOfPhase], *, named: bool = True) -> None:
    """Shade the phases of a run behind what is drawn over its steps.

    Args:
        axes: With steps along the x axis.
        rows: Steps of the run.
        named: Whether their names stand above the axes.
    """
    free = -math.inf  # where the next name may begin: phases may be narrower than their names
    for band in bands(rows):
        begin, end = band.first - 0.5, band.last + 0.5
        shade, word = _LOOKS[band.phase]
        axes.axvspan(begin, end, color=shade, lw=0, zorder=0)
        axes.axvline(begin, color=FAINT_INK, lw=0.5, zorder=0.5)
        if named:
            letters = max(map(len, word.split("\n"))) + 1
            wide = letters * _LETTER_INCHES * axes.figure.dpi / axes.figure.bbox.width
            half = wide * (rows[-1].step - rows[0].step + 1) / 2
            middle = max((begin + end) / 2, free + half)
            free = middle + half
            at, place = (middle, 1.0), ("data", "axes fraction")
            annotate(axes, word, at, place, shift=(0, 3), ha="center", va="bottom")
    if rows:
        axes.set_xlim(rows[0].step - 0.5, rows[-1].step + 0.5)
