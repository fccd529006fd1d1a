"""Cholesky factors of a sparse matrix that is a long strip: block-tridiagonal after sorting.

Columns are sorted into levels by their distance from one end of the matrix's graph (George and Liu,
1981). Columns that fraction an entry lie in the same or in neighbouring levels. So with a level, or a
few, for each block, the matrix has blocks on its diagonal and beside it, and none elsewhere.
"""

from __future__ import annotations

import numpy as np

from timelyfreeze.planning.interior.rows import Floats, Ints

# Levels are joined until a block has this many columns: below it, calling numpy costs more than
# the arithmetic.
_LEAST_BLOCK = 40
# Relative to a unit diagonal; the next where rounding leaves a block indefinite.
_NUDGES = (1e-13, 1e-11, 1e-9, 1e-7)


class StripError(ArithmeticError):
    """Rounding made the matrix indefinite."""


class Strip:
    """Factors of symmetric matrices that fraction a pattern and have a diagonal of ones.

    Args:
        n: Columns.
        low: Column of each entry, the lower of two; each pair once, every diagonal entry included.
        high: The higher of the two.
    """

    def __init__(self, n: int, low: Ints, high: Ints) -> None:
        levels = _levels(n, low, high)
        sizes = _join(np.bincount(levels))
        self._sorted = np.argsort(levels, kind="stable")
        self._ends = np.cumsum(sizes)
        place = np.empty(n, dtype=np.int64)
        place[self._sorted] = np.arange(n)
        block_of = np.repeat(np.arange(len(sizes)), sizes)
        begin = self._ends - sizes

        # One flat array holds, for each block, the square on the diagonal and the one below it.
        below = np.append(sizes[1:], 0)
        self._square_at = np.cumsum(sizes * (sizes + below)) - sizes * (sizes + below)
        self._below_at = self._square_at + sizes * sizes
        self._n_values = int((sizes * (sizes + below)).sum())
        first, second = np.minimum(place[low], place[high]), np.maximum(place[low], place[high])
        column_block, row_block = block_of[first], block_of[second]
        assert (row_block - column_block <= 1).all()  # the levels' defining property
        base = np.where(
            row_block == column_block, self._square_at[column_block], self._below_at[column_block]
        )
        self._position = (
            base + (second - begin[row_block]) * sizes[column_block] + first - begin[column_block]
        )
        self._diagonal = self._position[low == high]
        self._sizes = sizes.tolist()

    @property
    def widest(self) -> int:
        """Columns of the widest block."""
        return max(self._sizes, default=0)

    def factor(self, entries: Floats) -> None:
        """Factor the matrix with these entries.

        Args:
            entries: One for each pair given to the constructor; 1 on the diagonal.

        Raises:
            StripError: If the matrix is indefinite, also after the largest nudge.
        """
        for nudge in _NUDGES:
            values = np.zeros(self._n_values)
            values[self._position] = entries
            values[self._diagonal] += nudge
            try:
                self._factor(values)
                return
            except np.linalg.LinAlgError:
                continue
        raise StripError(f"indefinite by more than {_NUDGES[-1]} of its diagonal")

    def _factor(self, values: Floats) -> None:
        # L = [[L0], [W0, L1], [W1, L2], ..]; kept are the W and the inverses of the L.
        self._inverses: list[Floats] = []
        self._couplings: list[Floats] = []
        for k, size in enumerate(self._sizes):
            square = values[self._square_at[k] : self._below_at[k]].reshape(size, size)
            if k:
                coupling = self._couplings[-1]
                square = square - coupling @ coupling.T
            inverse = _inverse(np.asarray(np.linalg.cholesky(square), dtype=np.float64))
            self._inverses.append(inverse)
            if k + 1 < len(self._sizes):
                rows = self._sizes[k + 1]
                at = self._below_at[k]
                below = values[at : at + rows * size].reshape(rows, size)
                self._couplings.append(below @ inverse.T)

    def solve(self, right: Floats) -> Floats:
        """Return x with M x = ``right``.

        Args:
            right: Shape [n], or [n, k] for k right sides at once.
        """
        return self.backward(self.forward(right))

    def forward(self, right: Floats) -> Floats:
        """Return the y with L y = ``right``, where M = L L'; y is in the order of the strip."""
        parts = np.split(right[self._sorted], self._ends[:-1])
        for k, inverse in enumerate(self._inverses):
            if k:
                parts[k] = parts[k] - self._couplings[k - 1] @ parts[k - 1]
            parts[k] = inverse @ parts[k]
        return np.concatenate(parts)

    def backward(self, y: Floats) -> Floats:
        """Return the x with L' x = y; what ``forward`` returned becomes the solution."""
        parts = np.split(y, self._ends[:-1])
        for k in reversed(range(len(self._inverses))):
            if k + 1 < len(parts):
                parts[k] = parts[k] - self._couplings[k].T @ parts[k + 1]
            parts[k] = self._inverses[k].T @ parts[k]
        x = np.empty_like(y)
        x[self._sorted] = np.concatenate(parts)
        return x


def _inverse(lower: Floats) -> Floats:
    """Return the inverse of a lower triangular matrix, by halves: numpy's takes it for any."""
    n = len(lower)
    if n <= _LEAST_BLOCK:
        return np.asarray(np.linalg.inv(lower), dtype=np.float64)
    half = n // 2
    first, second = _inverse(lower[:half, :half]), _inverse(lower[half:, half:])
    inverse = np.zeros_like(lower)
    inverse[:half, :half], inverse[half:, half:] = first, second
    inverse[half:, :half] = -second @ (lower[half:, :half] @ first)
    return inverse


def _levels(n: int, low: Ints, high: Ints) -> Ints:
    """Return each column's distance from an end of the graph; parts of it one after another."""
    apart = low != high
    tail = np.concatenate([low[apart], high[apart]])
    head = np.concatenate([high[apart], low[apart]])
    order = np.argsort(tail, kind="stable")
    neighbours = head[order]
    start = np.searchsorted(tail[order], np.arange(n + 1))
    levels = np.full(n, -1, dtype=np.int64)
    deepest = -1
    while (left := np.flatnonzero(levels < 0)).size:
        # The far end of the part that this column is in is a good place to begin.
        reached = _walk(left[0], start, neighbours)
        end = reached[-1][np.argmin(np.diff(start)[reached[-1]])]
        for level in _walk(end, start, neighbours):
            deepest += 1
            levels[level] = deepest
    return levels


def _walk(begin: int, start: Ints, neighbours: Ints) -> list[Ints]:
    """Breadth first: the columns at distance 0, 1, 2 .. from ``begin``."""
    seen = np.zeros(len(start) - 1, dtype=np.bool_)
    seen[begin] = True
    reached = [np.array([begin], dtype=np.int64)]
    while reached[-1].size:
        now = reached[-1]
        counts = start[now + 1] - start[now]
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        found = np.unique(neighbours[np.repeat(start[now], counts) + offsets])
        found = found[~seen[found]]
        seen[found] = True
        reached.append(found)
    return reached[:-1]


def _join(widths: Ints) -> Ints:
    """Join neighbouring levels to blocks of at least ``_LEAST_BLOCK`` columns."""
    sizes: list[int] = []
    for width in widths.tolist():
        if sizes and sizes[-1] < _LEAST_BLOCK:
            sizes[-1] += width
        else:
            sizes.append(width)
    return np.array(sizes, dtype=np.int64)
