"""Plasticity: distance of a module's output from an older copy's, and its course.

Egeria (KGT), Sec. 4.2 and App. B. On one batch, the module and its reference have the outputs A_T
and A_R. With Q = A as b rows, G = Q Q^T and rows of G divided by their norm, the plasticity is the
similarity-preserving loss (Eq. 1)

    P = || G_T - G_R ||_F^2 / b^2

Likeness of rows is compared, not the rows, so outputs turned or scaled as a whole count as equal.
The paper prints rows divided by their *squared* norm (``squared``), by which outputs twice as large
differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def similarity_loss(trained: ArrayLike, reference: ArrayLike, *, squared: bool = False) -> float:
    """Return P of two outputs.

    A row of zeros is like no other; its row of G stays zeros. Outputs A_T and A_R have the same
    shape [b, ...]; ``squared`` divides rows by their squared norm.
    """
    ours, theirs = np.asarray(trained), np.asarray(reference)
    difference = _similarities(ours, squared) - _similarities(theirs, squared)
    return float((difference**2).sum() / len(ours) ** 2)


def _similarities(output: NDArray[Any], squared: bool) -> NDArray[np.float64]:
    """Return G, shape [b, b]."""
    rows = output.reshape(len(output), -1).astype(np.float64)
    products = rows @ rows.T
    norms = np.linalg.norm(products, axis=1, keepdims=True)
    divisors = norms**2 if squared else norms
    normed: NDArray[np.float64] = np.divide(
        products, divisors, out=np.zeros_like(products), where=norms > 0.0
    )
    return normed


def spread_evenly(n: int, limit: int) -> NDArray[np.int64]:
    """Return at most ``limit`` of the positions 0 to n - 1, evenly spread, ascending."""
    taken = min(n, limit)
    return np.arange(taken, dtype=np.int64) * n // max(1, taken)


def slope(values: ArrayLike) -> float:
    """Return the slope of the least-squares line through values at 0, 1, 2, ..."""
    heights = np.asarray(values, dtype=np.float64)
    places = np.arange(len(heights)) - (len(heights) - 1) / 2
    spread = float(places @ places)
    return float(places @ heights) / spread if spread > 0.0 else 0.0


@dataclass(frozen=True)
class History:
    """Remembered plasticity of a module (Algorithm 1)."""

    values: tuple[float, ...] = ()  # P of the last evaluations, W at most, oldest first
    smoothed: tuple[float, ...] = ()  # their moving means (Eq. 2), W at most, oldest first
    # smallest and largest P since the history began; empty before the first
    range: tuple[float, ...] = ()
    stale: int = 0  # evaluations in a row, up to the last, in which the slope was small

    @property
    def slope(self) -> float:
        """Slope of the line through ``smoothed``, plasticity an evaluation."""
        return slope(self.smoothed)

    def after(self, value: float, window: int, tolerance: float) -> History:
        """Return the history with another evaluation.

        A slope is small if its absolute value is at most ``tolerance`` times the range of P since
        the history began: plasticities of different models differ by orders of magnitude. A single
        evaluation has no slope. ``value`` is P, ``window`` W and ``tolerance`` T.
        """
        values = (*self.values, value)[-window:]
        smoothed = (*self.smoothed, sum(values) / len(values))[-window:]
        lowest, highest = min((*self.range, value)), max((*self.range, value))
        has_line = len(smoothed) > 1
        is_stale = has_line and abs(slope(smoothed)) <= tolerance * (highest - lowest)
        stale = self.stale + 1 if is_stale else 0
        return History(values, smoothed, (lowest, highest), stale)
