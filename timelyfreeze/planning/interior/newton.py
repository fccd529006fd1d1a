"""Newton systems of an interior-point method, where the rows of a program form a long strip.

With rows G and positive weights d, a step of the method solves M x = f with M = G' diag(d) G. A
pipeline is long in time and narrow across its ranks: an action shares rows with the few that run
beside it, and only the budget of a stage ties the first microbatch to the last. A dense row of G
would fill all of M, so it becomes a column of its own, its overhead y: with S the sparse rows and B
the dense ones, M x = f is

    [S' d S   B'  ] [x]   [f]
    [B       -1/d ] [y] = [0].

1. Columns of x that fraction no row with each other (the freeze ratios) are eliminated, each by a
   division; then, in rounds, those that have no more than two neighbours left.
2. What is left of x is a strip, factored along its length (``strip``).
3. The overheads y are few; their system is dense.

The pattern is analysed once; each step only fills in numbers. Weights differ by twenty decades near
an optimum, so the strip is scaled to a unit diagonal and nudged by a relative 1e-13, and conjugate
gradients remove what that, and rounding, leave behind.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.planning.interior.elimination import Elimination
from timelyfreeze.planning.interior.rows import Floats, Ints, Rows, added, pairs
from timelyfreeze.planning.interior.strip import Strip, StripError

# Rows with more nonzeros than this are dense. A precedence row has three.
_MOST_NONZEROS = 12
_REFINEMENTS = 12
# Rounds of eliminating columns with few neighbours, and the least fraction of the columns for which a
# round pays.
_MOST_ROUNDS, _LEAST_SHARE = 8, 0.02
_FEW_NEIGHBOURS = 2


class NewtonMatrix:
    """M = G' diag(d) G for one G and many d. Notation: n columns, B dense rows.

    Args:
        rows: G. Every column must have a row with it alone, a bound, so that M is positive
            definite for any weights.
        eliminate: Columns to eliminate first, bool, shape [n]. Those that fraction a row with an
            earlier one of them are kept.

    Attributes:
        n_left: Columns that are left for the strip.
    """

    def __init__(self, rows: Rows, eliminate: NDArray[np.bool_]) -> None:
        is_dense = np.diff(rows.start) > _MOST_NONZEROS
        self._rows, n = rows, rows.n_columns
        self._sparse, self._dense = np.flatnonzero(~is_dense), np.flatnonzero(is_dense)
        sparse, dense = rows.select(~is_dense), rows.select(is_dense)
        n_dense = len(self._dense)

        # Entries of S' d S are weighted sums over rows; those of B are what they are.
        self._row, a, b = pairs(sparse.start)
        self._product = sparse.values[a] * sparse.values[b]
        first, second = sparse.columns[a], sparse.columns[b]
        keys, self._slot = np.unique(
            np.minimum(first, second) * n + np.maximum(first, second), return_inverse=True
        )
        self._n_sums, self._dense_values = len(keys), dense.values
        overheads = n + np.arange(n_dense)
        low = np.concatenate([keys // n, dense.columns, overheads])
        high = np.concatenate([keys % n, overheads[dense.row_of], overheads])

        chosen = eliminate.copy()
        both = chosen[first] & chosen[second] & (first != second)
        chosen[np.maximum(first, second)[both]] = False
        self._eliminations: list[Elimination] = []
        n_left = n
        while len(self._eliminations) <= _MOST_ROUNDS:
            none = np.zeros(n_dense, dtype=np.bool_)
            last = Elimination(n_left + n_dense, low, high, np.append(chosen, none))
            self._eliminations.append(last)
            low, high, n_left = last.low, last.high, n_left - int(chosen.sum())
            chosen = _with_few_neighbours(n_left, low, high)
            if chosen.sum() < _LEAST_SHARE * n_left:
                break

        self._inside = np.flatnonzero(high < n_left)
        self._low, self._high = low[self._inside], high[self._inside]
        self._diagonal = np.flatnonzero(self._low == self._high)
        self._strip = Strip(n_left, self._low, self._high)
        self.n_left = n_left
        self._border = np.flatnonzero((low < n_left) & (high >= n_left))
        self._border_at = low[self._border], high[self._border] - n_left
        self._small = np.flatnonzero(low >= n_left)
        self._small_at = low[self._small] - n_left, high[self._small] - n_left

    def factor(self, weights: Floats) -> None:
        """Prepare to solve with the row weights d.

        Args:
            weights: Shape [rows], positive.

        Raises:
            StripError: If rounding makes the matrix indefinite.
        """
        self._weights = weights
        sums = added(self._slot, weights[self._sparse][self._row] * self._product, self._n_sums)
        entries = np.concatenate([sums, self._dense_values, -1.0 / weights[self._dense]])
        for elimination in self._eliminations:
            entries = elimination.factor(entries)
        inside = entries[self._inside]
        self._scale = 1.0 / np.sqrt(inside[self._diagonal])
        self._strip.factor(inside * self._scale[self._low] * self._scale[self._high])
        self._factor_overheads(entries)

    def _factor_overheads(self, entries: Floats) -> None:
        n_dense = len(self._dense)
        border = np.zeros((self.n_left, n_dense))
        border[self._border_at] = entries[self._border] * self._scale[self._border_at[0]]
        self._over_border = self._strip.forward(border)
        small = np.zeros((n_dense, n_dense))
        low, high = self._small_at
        small[low, high] = small[high, low] = -entries[self._small]
        small += self._over_border.T @ self._over_border
        unit = 1.0 / np.sqrt(np.diag(small))
        try:
            inverse = np.linalg.inv(small * unit * unit[:, None])
        except np.linalg.LinAlgError as error:
            raise StripError("the system of the dense rows is singular") from error
        self._small_inverse = inverse * unit * unit[:, None]

    def solve(self, right: Floats, accuracy: float = 1e-10) -> Floats:
        """Solve M x = ``right``, by conjugate gradients on the factors.

        Args:
            right: Shape [n].
            accuracy: Stop when no entry of M x - ``right`` is larger, relative to the largest of
                ``right``, or where rounding allows no better.

        Returns:
            x, shape [n].
        """
        with np.errstate(over="ignore", invalid="ignore"):  # beside an optimum all digits may go
            return self._refined(right, accuracy)

    def _refined(self, right: Floats, accuracy: float) -> Floats:
        x = self._solve_once(right)
        residual = right - self._times(x)
        enough = accuracy * float(np.abs(right).max())
        direction = np.zeros_like(x)
        before = np.inf
        missing = [np.inf, np.inf]
        for _ in range(_REFINEMENTS):
            missing.append(float(np.abs(residual).max()))
            if missing[-1] <= enough or missing[-1] > 0.5 * missing[-3]:
                break
            better = self._solve_once(residual)
            energy = float(residual @ better)
            direction = better + energy / before * direction
            image = self._times(direction)
            curvature = float(direction @ image)
            if not (0.0 < energy < np.inf and 0.0 < curvature < np.inf):
                break  # rounding has the upper hand
            step = energy / curvature
            x = x + step * direction
            residual = residual - step * image
            before = energy
        return x

    def _times(self, x: Floats) -> Floats:
        return self._rows.transposed_times(self._weights * self._rows.times(x))

    def _solve_once(self, right: Floats) -> Floats:
        rights = [np.append(right, np.zeros(len(self._dense)))]
        for elimination in self._eliminations:
            rights.append(elimination.forward(rights[-1]))
        left, of_overheads = rights[-1][: self.n_left], rights[-1][self.n_left :]
        y = self._strip.forward(self._scale * left)
        overheads = self._small_inverse @ (self._over_border.T @ y - of_overheads)
        x = np.append(
            self._scale * self._strip.backward(y - self._over_border @ overheads), overheads
        )
        for elimination, before in zip(
            reversed(self._eliminations), reversed(rights[:-1]), strict=True
        ):
            x = elimination.backward(before, x)
        return x[: len(right)]


def _with_few_neighbours(n: int, low: Ints, high: Ints) -> NDArray[np.bool_]:
    """Choose columns of the first ``n`` that have few neighbours among these, and none chosen."""
    apart = (low != high) & (high < n)
    low, high = low[apart], high[apart]
    few = np.bincount(np.concatenate([low, high]), minlength=n) <= _FEW_NEIGHBOURS
    # Of neighbours the one that comes first in a random order is chosen, so that a chain loses
    # about a third of its columns.
    turn = np.random.default_rng(0).permutation(n)
    both = few[low] & few[high]
    low, high = low[both], high[both]
    few[np.where(turn[low] < turn[high], high, low)] = False
    return few
