"""The loss of a run against steps and against seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from timelyfreeze.plots.style import CYCLE, FAINT_INK, WIDTH_INCHES, house_style
from timelyfreeze.records import WINDOW, LossRow, running_means

_DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (5, 1, 1, 1)))


@dataclass(frozen=True)
class LossLine:
    """Losses of one run.

    Attributes:
        label: What it is called.
        rows: Its losses, in the order in which they were written.
    """

    label: str
    rows: Sequence[LossRow]


def loss_figure(lines: Sequence[LossLine], title: str = "") -> Figure:
    """Draw the losses of runs, of one as a rule, against steps and against seconds.

    Training losses are drawn pale as they were logged, and as their running mean, which is what
    times to a loss are taken from. Validation losses are points.

    Args:
        lines: The run first; others, such as a reference, behind it.
        title: Stands above.

    Raises:
        ValueError: If no run has a loss.
    """
    if not any(line.rows for line in lines):
        raise ValueError("losses.csv has no loss yet; there is nothing to draw")
    with house_style():
        figure = Figure(figsize=(WIDTH_INCHES, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for number, line in enumerate(lines):
            _draw(left, right, line, number)
        left.set(xlabel="optimizer step", ylabel="loss")
        right.set(xlabel="seconds of training")
        for axes in (left, right):
            axes.grid(axis="y")
            axes.set_xlim(left=0)
        figure.suptitle(title, x=0.01, ha="left")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def _draw(left: Axes, right: Axes, line: LossLine, number: int) -> None:
    color, dash = CYCLE[number % len(CYCLE)], _DASHES[number % len(_DASHES)]
    trained = [row for row in line.rows if row.train_loss is not None]
    losses = [row.train_loss for row in trained if row.train_loss is not None]
    window = WINDOW if len(losses) >= 2 * WINDOW else 1
    means = running_means(losses, window)
    label = f"{line.label}: training"
    if window > 1:
        label += f", mean of {window} logged"
    validated = [row for row in line.rows if row.validation_loss is not None]
    validations = [row.validation_loss for row in validated if row.validation_loss is not None]
    point: Any = {"color": color, "marker": "o", "ms": 4, "lw": 0, "mec": FAINT_INK, "mew": 0.5}
    for axes, place in ((left, "step"), (right, "seconds")):
        ends = [float(getattr(row, place)) for row in trained]
        if window > 1:
            axes.plot(ends, losses, color=color, lw=0.7, alpha=0.35)
        axes.plot(ends[window - 1 :], means, color=color, ls=dash, lw=1.8, label=label)
        if validated:
            at = [float(getattr(row, place)) for row in validated]
            axes.plot(at, validations, label=f"{line.label}: validation", **point)
