"""The curves of a run folder, each from one of its files; a reason where there is no such file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from matplotlib.figure import Figure

from timelyfreeze.plots.convergence import convergence_figure
from timelyfreeze.plots.curves import curves_figure
from timelyfreeze.plots.histogram import histogram_figure
from timelyfreeze.plots.loss import LossLine, loss_figure
from timelyfreeze.plots.response import response_figure
from timelyfreeze.records import counts, losses, responses, run_title, steps

Row = TypeVar("Row")


def draw_curves(run_folder: Path) -> Figure | str:
    """Draw freeze ratio and throughput over steps, or say why not.

    Raises:
        ValueError: If a file cannot be read.
    """
    rows = _rows(steps.read_steps, run_folder)
    if not rows:
        return f"{steps.STEPS_FILE} has no step: the run ended before the first step was logged"
    return curves_figure(rows, run_title(run_folder))


def draw_convergence(run_folder: Path) -> Figure | str:
    """Draw kappa, p_eff and their ratio, or say why not.

    Raises:
        ValueError: If a file cannot be read.
    """
    rows = _rows(steps.read_steps, run_folder)
    if not any(row.kappa is not None or row.p_eff is not None for row in rows):
        return (
            f"{steps.STEPS_FILE} has neither kappa nor p_eff: nothing was frozen, or too few steps"
        )
    return convergence_figure(rows, run_title(run_folder))


def draw_loss(run_folder: Path) -> Figure | str:
    """Draw the loss against steps and seconds, or say why not.

    Raises:
        ValueError: If a file cannot be read.
    """
    rows = _rows(losses.read_losses, run_folder)
    if not rows:
        return f"{losses.LOSSES_FILE} has no loss: none was logged"
    return loss_figure([LossLine("this run", rows)], run_title(run_folder))


def draw_response(run_folder: Path) -> Figure | str:
    """Draw backward times against freeze ratios, of a run or a profile, or say why not.

    Raises:
        ValueError: If a file cannot be read.
    """
    rows = _rows(responses.read_responses, run_folder)
    if not rows:
        return (
            f"{responses.RESPONSES_FILE} has no backward: the run froze nothing, or has not ended"
        )
    return response_figure(rows, run_title(run_folder))


def draw_histogram(run_folder: Path) -> Figure | str:
    """Draw how often tensors were frozen, or say why not.

    Raises:
        ValueError: If a file cannot be read.
    """
    rows = _rows(counts.read_counts, run_folder)
    if not any(row.backwards for row in rows):
        return f"{counts.COUNTS_FILE} has no backward: freezing has not begun, or the run has not ended"
    return histogram_figure(rows, run_title(run_folder))


def _rows(read: Callable[[Path], list[Row]], run_folder: Path) -> list[Row]:
    """Return what a file has; nothing where there is none."""
    try:
        return read(run_folder)
    except FileNotFoundError:
        return []
