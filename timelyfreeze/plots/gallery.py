"""Every plot and trace that a run folder can give. A new one is a line here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from matplotlib.figure import Figure

from timelyfreeze.plots.curves import convergence_figure, curves_figure, loss_figure
from timelyfreeze.plots.front import front_figure
from timelyfreeze.plots.response import histogram_figure, response_figure
from timelyfreeze.plots.run_timelines import (
    draw_measured,
    draw_predicted,
    trace_measured,
    trace_predicted,
)
from timelyfreeze.records import RunNames, read_names, run_title, tables

Row = TypeVar("Row")
Draw = Callable[[Path], Figure | str]


def _draws(
    figure: Callable[[list[Row], str], Figure],
    read: Callable[[Path], list[Row]],
    reason: str,
    is_known: Callable[[Row], Any] = lambda row: True,
) -> Draw:
    """Return what draws the rows of one file, or gives the reason if none of them is known."""

    def draw(run_folder: Path) -> Figure | str:
        try:
            rows = read(run_folder)
        except FileNotFoundError:
            return reason
        return figure(rows, run_title(run_folder)) if any(map(is_known, rows)) else reason

    return draw


def draw_curves(run_folder: Path) -> Figure | str:
    """Draw freeze ratio and throughput over steps; or say why not.

    Raises:
        ValueError: If a file cannot be read.
    """
    names = _names(run_folder)
    n_emulated = names.n_ranks if names is not None and names.is_emulated else 1
    unit = "tokens" if names is None else names.unit
    draw = _draws(
        partial(curves_figure, n_emulated=n_emulated, unit=unit),
        tables.STEPS.read,
        f"{tables.STEPS.name} has no step: the run ended before the first step was logged",
    )
    return draw(run_folder)


def _names(run_folder: Path) -> RunNames | None:
    try:
        return read_names(run_folder)
    except ValueError:  # told once, by who draws all plots
        return None


def draw_front(run_folder: Path) -> Figure | str:
    """Draw the frozen front over steps, and plasticity where there is any; or say why not.

    Raises:
        ValueError: If a file cannot be read.
    """
    try:
        rows = tables.FRONT.read(run_folder)
    except FileNotFoundError:
        return f"{tables.FRONT.name} has no step: the run's method freezes no front"
    has_evaluations = (run_folder / tables.PLASTICITY.name).exists()
    evaluations = tables.PLASTICITY.read(run_folder) if has_evaluations else []
    if not rows or not (evaluations or any(row.frozen_layers for row in rows)):
        return f"{tables.FRONT.name} has no front: nothing was frozen yet"
    has_moves = (run_folder / tables.MOVES.name).exists()
    moved = tables.MOVES.read(run_folder) if has_moves else []
    return front_figure(rows, evaluations, run_title(run_folder), moved)


draw_convergence = _draws(
    convergence_figure,
    tables.STEPS.read,
    f"{tables.STEPS.name} has neither kappa nor p_eff: nothing was frozen, or too few steps",
    lambda row: row.kappa is not None or row.p_eff is not None,
)
draw_loss = _draws(
    loss_figure,
    tables.LOSSES.read,
    f"{tables.LOSSES.name} has no loss: none was logged",
)
draw_response = _draws(
    response_figure,
    tables.read_responses,
    f"{tables.RESPONSES.name} has no backward: the run froze nothing, or has not ended",
)
draw_histogram = _draws(
    histogram_figure,
    tables.COUNTS.read,
    f"{tables.COUNTS.name} has no backward: freezing has not begun, or the run has not ended",
    lambda row: row.backwards,
)

# Name of the files, and a function of the run folder: the plot, or why there is none. A file
# that is there and cannot be read is a ValueError. What stands before the first "_" groups plots
# in TensorBoard.
PLOTS: tuple[tuple[str, Draw], ...] = (
    ("timeline_measured", draw_measured),
    ("timeline_predicted", draw_predicted),
    ("curves", draw_curves),
    ("front", draw_front),
    ("loss", draw_loss),
    ("convergence", draw_convergence),
    ("response", draw_response),
    ("histogram", draw_histogram),
)

# Likewise; the text of the file, or None where the plot of the same data says why.
TRACES: tuple[tuple[str, Callable[[Path], str | None]], ...] = (
    ("trace_measured", trace_measured),
    ("trace_predicted", trace_predicted),
)
