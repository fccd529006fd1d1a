"""How often each tensor was frozen, rank by rank: Fig. 14 of arXiv:2602.05754."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from timelyfreeze.plots.style import BLUE, VERMILLION, house_style, panels
from timelyfreeze.records import FrozenCount

_BINS = 25


def histogram_figure(counts: Sequence[FrozenCount], title: str = "") -> Figure:
    """Draw for each rank how many of the model's tensors were frozen how often.

    Raises:
        ValueError: If freezing has not begun.
    """
    counts = [count for count in counts if count.backwards]
    if not counts:
        raise ValueError("no backward ran since freezing began; there is nothing to draw")
    ranks = sorted({count.rank for count in counts})
    of_ranks = [[count for count in counts if count.rank == rank] for rank in ranks]
    return frequencies_figure([f"rank {rank}" for rank in ranks], of_ranks, title)


def frequencies_figure(
    names: Sequence[str], parts: Sequence[Sequence[FrozenCount]], title: str = ""
) -> Figure:
    """Draw how many tensors were frozen how often, with a panel for each part.

    Args:
        names: Of the parts.
        parts: Tensors of one rank each.
        title: Of the plot.
    """
    names = [f"{name}: {len(part)} tensors" for name, part in zip(names, parts, strict=True)]
    with house_style():
        figure, drawn = panels(
            names, 2.1, title,
            x_label="backwards that left it out", y_label="tensors", sharey=True,
        )  # fmt: skip
        for panel, of_rank in zip(drawn, parts, strict=True):
            frequencies = [count.frequency for count in of_rank]
            panel.hist(
                frequencies, bins=np.linspace(0, 1, _BINS + 1).tolist(),
                weights=np.full(len(of_rank), 1 / len(of_rank)), color=BLUE, edgecolor="white",
                linewidth=0.4, label="fraction of the rank's tensors",
            )  # fmt: skip
            mean = mean_frequency(of_rank)
            panel.axvline(mean, color=VERMILLION, lw=1.4, label="mean over elements")
            panel.set_xlim(0, 1)
            panel.xaxis.set_major_formatter("{x:.0%}")
            panel.yaxis.set_major_formatter("{x:.0%}")
        handles = drawn[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=2)
    return figure


def mean_frequency(counts: Sequence[FrozenCount]) -> float:
    """Return which fraction of the backwards left an element out, mean over all elements."""
    sizes = np.array([count.elements for count in counts], dtype=float)
    return float(np.average([count.frequency for count in counts], weights=sizes))
