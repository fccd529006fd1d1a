"""kappa, p_eff and kappa / p_eff over the steps of a run: Sec. 3.4 of arXiv:2602.05754."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from timelyfreeze.plots.phases import draw_by_phase, shade_phases
from timelyfreeze.plots.style import (
    BLUE,
    INK,
    ORANGE,
    VERMILLION,
    WIDTH_INCHES,
    annotate,
    house_style,
)
from timelyfreeze.records import StepRow, kappa_over_p_eff
from timelyfreeze.settings import FREEZING_PHASES

_FREEZING = {phase.value for phase in FREEZING_PHASES}


def convergence_figure(rows: Sequence[StepRow], title: str = "") -> Figure:
    """Draw what a step of a run costs, what it updates, and what both come to.

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
            (below, ratios, "kappa / p_eff: time to a loss", VERMILLION, "D"),
        ):
            draw_by_phase(axes, rows, values, label=label, color=color, marker=marker, ms=3, lw=1.4)
        above.set_ylim(bottom=0)
        above.set_ylabel("fraction of the\nunfrozen step")
        below.axhline(1.0, color=INK, lw=0.9, ls=(0, (4, 3)))
        text, place = "below this line freezing gets to a loss sooner", ("axes fraction", "data")
        annotate(below, text, (0.0, 1.0), place, shift=(4, -3), color=INK, ha="left", va="top")
        below.set_ylim(bottom=0, top=max([1.4, *(1.08 * ratio for ratio in known)]))
        below.set_ylabel("of the run\nwithout freezing")
        below.set_xlabel("optimizer step")
        for axes in (above, below):
            axes.grid(axis="y")
        above.set_title(title, loc="left", pad=28)
        figure.legend(loc="outside lower center", ncols=3)
    return figure
