"""Newton systems of an interior-point method, where the rows of a program form a long strip.

With rows G and positive weights d, a step of the method solves M x = f with M = G' diag(d) G. A
pipeline is long in time and narrow across its ranks: an action shares rows with the few that run
beside it, and only the budget of a stage ties the first microbatch to the last. So M is, after
sorting, block-tridiagonal with blocks about as wide as the pipeline, plus one dense row for each
budget. It is factored in three moves:

1. columns that share no row with each other (the freeze ratios) are eliminated, each by a division;
2. what is left is sorted into levels by distance from one end, and a Cholesky factorisation walks
   along them (George and Liu, 1981: a level only touches the next);
3. dense rows become a small dense system of their own (a Schur complement).

The pattern is analysed once; each step only fills in numbers. Weights differ by twenty decades near
an optimum, so M is scaled to a unit diagonal and nudged by a relative 1e-13, and conjugate
gradients remove what that, and rounding, leave behind.

Notation: n columns, of which E are eliminated and K kept; B dense rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.interior.rows import Rows, added
from timelyfreeze.interior.strip import Strip

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Rows with more nonzeros than this are dense. A precedence row has three.
_MOST_NONZEROS = 12
_REFINEMENTS = 12


class NewtonMatrix:
    """M = G' diag(d) G for one G and many d.

    Args:
        rows: G. Every column must have a row with it alone, a bound, so that M is positive
            definite for any weights.
        eliminate: Columns to eliminate first, bool, shape [n]. Those that share a row with an
            earlier one of them are kept after all.
    """

    def __init__(self, rows: Rows, eliminate: NDArray[np.bool_]) -> None:
        is_dense = np.diff(rows.start) > _MOST_NONZEROS
        self._rows = rows
        self._dense = np.flatnonzero(is_dense)
        self._sparse = np.flatnonzero(~is_dense)
        sparse = rows.select(~is_dense)
        row, a, b = _pairs(sparse.start)
        low = np.minimum(sparse.columns[a], sparse.columns[b])
        high = np.maximum(sparse.columns[a], sparse.columns[b])
        chosen = eliminate.copy()
        chosen[high[eliminate[low] & eliminate[high] & (low != high)]] = False
        self._eliminated, self._kept = np.flatnonzero(chosen), np.flatnonzero(~chosen)
        place = np.empty(rows.n_columns, dtype=np.int64)  # of a column among its own kind
        place[self._eliminated] = np.arange(len(self._eliminated))
        place[self._kept] = np.arange(len(self._kept))
        n_kept = len(self._kept)
        product = sparse.values[a] * sparse.values[b]

        # M between an eliminated column and itself, and between it and a kept one.
        own = chosen[low] & chosen[high]
        self._own = _Sum(place[low[own]], row[own], product[own], len(self._eliminated))
        mixed = chosen[low] != chosen[high]
        e = place[np.where(chosen[low], low, high)[mixed]]
        k = place[np.where(chosen[low], high, low)[mixed]]
        keys, slot = np.unique(e * n_kept + k, return_inverse=True)
        self._mixed = _Sum(slot, row[mixed], product[mixed], len(keys))
        self._mixed_e, self._mixed_k = keys // n_kept, keys % n_kept

        # M between kept columns: from rows, and from what elimination leaves behind.
        both = ~chosen[low] & ~chosen[high]
        start = np.searchsorted(self._mixed_e, np.arange(len(self._eliminated) + 1))
        self._fill_e, self._fill_a, self._fill_b = _pairs(start)
        fill_low = np.minimum(self._mixed_k[self._fill_a], self._mixed_k[self._fill_b])
        fill_high = np.maximum(self._mixed_k[self._fill_a], self._mixed_k[self._fill_b])
        keys, slot = np.unique(
            np.concatenate(
                [place[low[both]] * n_kept + place[high[both]], fill_low * n_kept + fill_high]
            ),
            return_inverse=True,
        )
        n_both = int(both.sum())
        self._both = _Sum(slot[:n_both], row[both], product[both], len(keys))
        self._fill_slot = slot[n_both:]
        self._low, self._high = keys // n_kept, keys % n_kept
        self._diagonal = np.flatnonzero(self._low == self._high)
        self._strip = Strip(n_kept, self._low, self._high)

        # The dense rows, as arrays [B, E] and [B, K].
        dense = rows.select(is_dense)
        table = np.zeros((len(self._dense), rows.n_columns))
        table[dense.row_of, dense.columns] = dense.values
        self._dense_e = np.ascontiguousarray(table[:, self._eliminated])
        self._dense_k = np.ascontiguousarray(table[:, self._kept])

    @property
    def widest(self) -> int:
        """Columns of the widest block: the cost of a factorisation grows with its square."""
        return self._strip.widest

    def factor(self, weights: Floats) -> None:
        """Prepare to solve with the row weights d.

        Args:
            weights: Shape [rows], positive.

        Raises:
            StripError: If rounding makes the matrix indefinite.
        """
        self._weights = weights
        sparse = weights[self._sparse]
        own = self._own(sparse)
        mixed = self._mixed(sparse)
        both = self._both(sparse)
        left = mixed[self._fill_a] * mixed[self._fill_b] / own[self._fill_e]
        both -= added(self._fill_slot, left, len(both))
        scale = 1.0 / np.sqrt(both[self._diagonal])
        self._own_values, self._mixed_values, self._scale = own, mixed, scale
        both *= scale[self._low] * scale[self._high]
        self._strip.factor(both)
        if len(self._dense):
            self._factor_dense(weights[self._dense])

    def _factor_dense(self, weights: Floats) -> None:
        over_own = self._dense_e / self._own_values
        border = self._dense_k.copy()
        for dense, values in zip(border, over_own, strict=True):
            dense -= added(
                self._mixed_k, self._mixed_values * values[self._mixed_e], border.shape[1]
            )
        self._over_own, self._border = over_own, border * self._scale
        self._border_solved = self._strip.solve(np.ascontiguousarray(self._border.T))
        small = np.diag(1.0 / weights) + over_own @ self._dense_e.T
        small += self._border @ self._border_solved
        unit = 1.0 / np.sqrt(np.diag(small))
        self._small = np.linalg.inv(small * unit * unit[:, None]) * unit * unit[:, None]

    def solve(self, right: Floats, accuracy: float = 1e-10) -> Floats:
        """Solve M x = ``right``, by conjugate gradients on the factors.

        Args:
            right: Shape [n].
            accuracy: Stop when no entry of M x - ``right`` is larger, relative to the largest of
                ``right``; or after a few rounds, where rounding allows no better.

        Returns:
            x, shape [n].
        """
        x = self._solve_once(right)
        residual = right - self._times(x)
        enough = accuracy * float(np.abs(right).max())
        direction = np.zeros_like(x)
        before = np.inf
        for _ in range(_REFINEMENTS):
            if float(np.abs(residual).max()) <= enough:
                break
            better = self._solve_once(residual)
            energy = float(residual @ better)
            direction = better + energy / before * direction
            image = self._times(direction)
            curvature = float(direction @ image)
            if not (energy > 0.0 and curvature > 0.0):
                break  # rounding has the upper hand
            step = energy / curvature
            x = x + step * direction
            residual = residual - step * image
            before = energy
        return x

    def _times(self, x: Floats) -> Floats:
        return self._rows.transposed_times(self._weights * self._rows.times(x))

    def _solve_once(self, right: Floats) -> Floats:
        n_kept = len(self._kept)
        over_own = right[self._eliminated] / self._own_values
        moved = added(self._mixed_k, self._mixed_values * over_own[self._mixed_e], n_kept)
        kept = self._strip.solve(self._scale * (right[self._kept] - moved))
        multipliers = np.zeros(len(self._dense))
        if len(self._dense):
            multipliers = self._small @ (self._border @ kept + self._dense_e @ over_own)
            kept = kept - self._border_solved @ multipliers
        kept *= self._scale
        x = np.empty(self._rows.n_columns)
        x[self._kept] = kept
        taken = added(
            self._mixed_e, self._mixed_values * kept[self._mixed_k], len(self._eliminated)
        )
        taken += multipliers @ self._dense_e
        x[self._eliminated] = over_own - taken / self._own_values
        return x


class _Sum:
    """Entries of M as weighted sums over rows."""

    def __init__(self, slot: Ints, row: Ints, product: Floats, n_slots: int) -> None:
        self._slot, self._row, self._product, self._n_slots = slot, row, product, n_slots

    def __call__(self, weights: Floats) -> Floats:
        return added(self._slot, weights[self._row] * self._product, self._n_slots)


def _pairs(start: Ints) -> tuple[Ints, Ints, Ints]:
    """All unordered pairs of positions within each group ``start[g]:start[g + 1]``, equal ones too.

    Returns:
        Group, first and second position of each pair.
    """
    lengths = np.diff(start)
    groups, first, second = [], [], []
    for length in np.unique(lengths[lengths > 0]).tolist():
        of_length = np.flatnonzero(lengths == length)
        a, b = np.triu_indices(length)
        groups.append(np.repeat(of_length, len(a)))
        first.append((start[of_length][:, None] + a).ravel())
        second.append((start[of_length][:, None] + b).ravel())
    if not groups:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, empty
    return np.concatenate(groups), np.concatenate(first), np.concatenate(second)
