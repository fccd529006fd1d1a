"""Phases of a run behind a curve over its steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

from matplotlib.axes import Axes

from timelyfreeze.plots.style import FAINT_INK, SMALL_POINTS, annotate
from timelyfreeze.settings import Phase

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
