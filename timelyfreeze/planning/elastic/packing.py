"""AutoFreeze's packing: what memory that freezing sets free is used for (arXiv:2102.01386, 3.3).

A worker that keeps fewer activations has room for a larger batch. *Performance packing* keeps all
workers and lets them take it; *efficiency packing* keeps the total batch and does with fewer
workers. Which batch has room is told by whoever asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchPacking:
    """How a step's rows come together.

    Attributes:
        factor: Rows of a worker's batch, over those at the start.
        accumulations: Batches of a worker whose gradients are added up in a step.
        growth: Rows of a step, over those at the start.
    """

    factor: int
    accumulations: int
    growth: int = 1


def performance_packing(
    fits: Callable[[int], bool], accumulations: int, max_growth: int = 1
) -> BatchPacking:
    """Return the packing with the largest batch that there is room for.

    Steps first take fewer batches of more rows, the same rows in all; once they are down to one
    batch, they take more rows, in whole multiples of those at the start.

    Args:
        fits: Whether a worker has room for a batch so many times as large as at the start, above 1.
        accumulations: Batches of a step at the start, at least 1.
        max_growth: How many times as many rows a step may have at most, at least 1.

    Raises:
        ValueError: If a number is out of range.
    """
    for name, number in (("accumulations", accumulations), ("max_growth", max_growth)):
        if number < 1:
            raise ValueError(f"{name} is {number}; it must be 1 or more")
    best = BatchPacking(1, accumulations)
    same_rows = [
        BatchPacking(n, accumulations // n)
        for n in range(2, accumulations + 1)
        if accumulations % n == 0
    ]
    more_rows = [BatchPacking(accumulations * n, 1, n) for n in range(2, max_growth + 1)]
    for packing in (*same_rows, *more_rows):
        if not fits(packing.factor):
            break
        best = packing
    return best


def efficiency_workers(n_workers: int, rows: int, room: int) -> int:
    """Return how many workers do, for the same rows in a step.

    The paper's p b_0 / b_l, brought up to a number that deals the rows evenly: of its example, 64
    workers with 6 rows each, whose room grows to 54, 8 are left with 48 each.

    Args:
        n_workers: Workers at the start, p.
        rows: Rows of each in a step at the start, b_0.
        room: Rows that a worker now has room for, b_l, at least ``rows``.

    Raises:
        ValueError: If a number is below 1, or there is less room than at the start.
    """
    if n_workers < 1 or rows < 1:
        raise ValueError(f"{n_workers} workers with {rows} rows each; both must be 1 or more")
    if room < rows:
        raise ValueError(f"room is {room}; it must be at least the {rows} rows of the start")
    total = n_workers * rows
    least = -(-total // room)
    return next(n for n in range(least, n_workers + 1) if total % n == 0)


def last_step(n_steps: int, step: int, n_batches: int, growth: int) -> int:
    """Return the step with which a run has read the rows that it was to read.

    Args:
        n_steps: Steps of the run, if none had more rows than at the start.
        step: The step that was finished last.
        n_batches: Rows that were read until then, in steps of the start.
        growth: Rows of each step from now on, in steps of the start. The last step is a whole one,
            so it may read up to ``growth`` - 1 of them more.
    """
    return step + -(-(n_steps - n_batches) // growth)
