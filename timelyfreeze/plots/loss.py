"""The loss of a run against steps and against seconds."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from timelyfreeze.plots.style import BLUE, FAINT_INK, WIDTH_INCHES, house_style
from timelyfreeze.records import WINDOW, LossRow, running_means


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
