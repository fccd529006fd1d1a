"""How often each tensor was frozen, rank by rank: Fig. 14 of arXiv:2602.05754."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from timelyfreeze.plots.style import BLUE, VERMILLION, WIDTH_INCHES, house_style
from timelyfreeze.records import FrozenCount

_BINS = 25
_MOST_COLUMNS = 4


def histogram_figure(counts: Sequence[FrozenCount], title: str = "") -> Figure:
    """Draw for each rank how many of the model's tensors were frozen how often.

    Raises:
        ValueError: If freezing has not begun.
    """
    counts = [count for count in counts if count.backwards]
    if not counts:
        raise ValueError("no backward ran since freezing began; there is nothing to draw")
    ranks = sorted({count.rank for count in counts})
    n_columns = min(_MOST_COLUMNS, len(ranks))
    n_lines = math.ceil(len(ranks) / n_columns)
    with house_style():
        figure = Figure(figsize=(WIDTH_INCHES, 0.7 + 2.1 * n_lines), layout="constrained")
        panels = figure.subplots(n_lines, n_columns, sharex=True, sharey=True, squeeze=False)
        for panel, rank in zip(panels.flat, ranks, strict=False):
            of_rank = [count for count in counts if count.rank == rank]
            frequencies = [count.frequency for count in of_rank]
            sizes = np.array([count.elements for count in of_rank], dtype=float)
            mean = float(np.average(frequencies, weights=sizes))
            panel.hist(
                frequencies,
                bins=np.linspace(0, 1, _BINS + 1).tolist(),
                weights=np.full(len(of_rank), 1 / len(of_rank)),
                color=BLUE,
                edgecolor="white",
                linewidth=0.4,
                label="fraction of the rank's tensors",
            )
            panel.axvline(mean, color=VERMILLION, lw=1.4, label="mean over elements")
            panel.set_title(f"rank {rank}: {len(of_rank)} tensors", fontsize="medium")
            panel.set_xlim(0, 1)
            panel.yaxis.set_major_formatter("{x:.0%}")
        for panel in list(panels.flat)[len(ranks) :]:
            panel.set_visible(False)
        for panel in panels[:, 0]:
            panel.set_ylabel("tensors")
        for panel in panels[-1]:
            panel.set_xlabel("fraction of backwards that left it out")
        figure.suptitle(title, x=0.01, ha="left")
        figure.legend(
            *panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2
        )
    return figure
