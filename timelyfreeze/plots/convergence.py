"""kappa, p_eff and kappa / p_eff over the steps of a run: Sec. 3.4 of arXiv:2602.05754."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from timelyfreeze.plots.phases import draw_by_phase, shade_phases
from timelyfreeze.plots.style import (
    BLUE,
    INK,
    ORANGE,
    SMALL_POINTS,
    VERMILLION,
    WIDTH_INCHES,
    house_style,
)
from timelyfreeze.records import StepRow, kappa_over_p_eff
from timelyfreeze.settings import FREEZING_PHASES

_FREEZING = {phase.value for phase in FREEZING_PHASES}


def convergence_figure(rows: Sequence[StepRow], title: str = "") -> Figure:
    """Draw what a step costs, what it updates, and what both come to.

    Args:
        rows: Steps of the run.
        title: Stands above.

    Returns:
        Figure: For ``style.save``.

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
        look: dict[str, Any] = {"ms": 3, "lw": 1.4}
        draw_by_phase(
            above, rows, kappa, label="kappa: time of a step", color=BLUE, marker="o", **look
        )
        draw_by_phase(
            above,
            rows,
            p_eff,
            label="p_eff: gradient energy that is updated",
            color=ORANGE,
            marker="s",
            **look,
        )
        above.set_ylim(bottom=0)
        above.set_ylabel("fraction of the unfrozen step")
        draw_by_phase(
            below,
            rows,
            ratios,
            label="kappa / p_eff: time to a loss",
            color=VERMILLION,
            marker="D",
            **look,
        )
        below.axhline(1.0, color=INK, lw=0.9, ls=(0, (4, 3)))
        below.annotate(
            "below this line freezing gets to a loss sooner",
            (0.0, 1.0),
            xycoords=("axes fraction", "data"),
            xytext=(4, -3),
            textcoords="offset points",
            ha="left",
            va="top",
            fontsize=SMALL_POINTS,
            color=INK,
        )
        below.set_ylim(bottom=0, top=max([1.4, *(1.08 * ratio for ratio in known)]))
        below.set_ylabel("of the run without freezing")
        below.set_xlabel("optimizer step")
        for axes in (above, below):
            axes.grid(axis="y")
        above.set_title(title, loc="left", pad=28)
        figure.legend(loc="outside lower center", ncols=3)
    return figure
