"""One round of symmetric elimination: columns that fraction no entry go, each by a division.

Of a symmetric matrix M = [[D, C'], [C, K]] with D diagonal, K - C D^-1 C' is left. Where
columns of D have few neighbours, few of its entries are new.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.planning.interior.rows import Floats, Ints, added, pairs

# What is left of a diagonal entry at least, relatively; rounding may leave less than nothing.
_LEAST_LEFT = 1e-13


class Elimination:
    """Which entries of a matrix a round touches, and their numbers.

    Args:
        n: Columns.
        low: Column of each entry, the lower of two; each pair once, every diagonal entry of a
            chosen column included.
        high: The higher of the two.
        chosen: Columns to eliminate, bool, shape [n]; no entry has two of them.

    Attributes:
        low: The same of what is left, in which columns keep their order.
        high: The same.
    """

    def __init__(self, n: int, low: Ints, high: Ints, chosen: NDArray[np.bool_]) -> None:
        self._chosen, self._kept = np.flatnonzero(chosen), np.flatnonzero(~chosen)
        n_kept = len(self._kept)
        place = np.empty(n, dtype=np.int64)  # of a column among its own kind
        place[self._chosen] = np.arange(len(self._chosen))
        place[self._kept] = np.arange(n_kept)

        own = np.flatnonzero(chosen[low] & chosen[high])
        assert (low[own] == high[own]).all()
        self._own = own[np.argsort(place[low[own]])]
        mixed = np.flatnonzero(chosen[low] != chosen[high])
        inner = place[np.where(chosen[low], low, high)[mixed]]
        by_inner = np.argsort(inner, kind="stable")
        self._mixed, self._inner = mixed[by_inner], inner[by_inner]
        self._outer = place[np.where(chosen[low], high, low)[self._mixed]]

        # What stays, and what elimination adds to it: an entry for each pair of neighbours.
        self._stays = np.flatnonzero(~chosen[low] & ~chosen[high])
        start = np.searchsorted(self._inner, np.arange(len(self._chosen) + 1))
        self._of, self._first, self._second = pairs(start)
        first, second = self._outer[self._first], self._outer[self._second]
        keys, slot = np.unique(
            np.concatenate(
                [
                    place[low[self._stays]] * n_kept + place[high[self._stays]],
                    np.minimum(first, second) * n_kept + np.maximum(first, second),
                ]
            ),
            return_inverse=True,
        )
        self._stays_at, self._fills_at = slot[: len(self._stays)], slot[len(self._stays) :]
        self._is_diagonal = low[self._stays] == high[self._stays]
        self.low, self.high = keys // max(n_kept, 1), keys % max(n_kept, 1)

    def factor(self, entries: Floats) -> Floats:
        """Eliminate from the matrix with these entries; return the entries of what is left.

        A diagonal entry that is positive stays so.
        """
        self._over = 1.0 / entries[self._own]
        self._coupling = entries[self._mixed]
        fill = self._coupling[self._first] * self._coupling[self._second] * self._over[self._of]
        left = -added(self._fills_at, fill, len(self.low))
        stays = entries[self._stays]
        left[self._stays_at] += stays
        at, before = self._stays_at[self._is_diagonal], stays[self._is_diagonal]
        left[at] = np.where(before > 0.0, np.maximum(left[at], _LEAST_LEFT * before), left[at])
        return left

    def forward(self, right: Floats) -> Floats:
        """Return the right side of what is left, for a right side of the whole."""
        moved = (self._over * right[self._chosen])[self._inner] * self._coupling
        return right[self._kept] - added(self._outer, moved, len(self._kept))

    def backward(self, right: Floats, kept: Floats) -> Floats:
        """Return the whole solution, from that of what is left."""
        taken = added(self._inner, self._coupling * kept[self._outer], len(self._chosen))
        x = np.empty_like(right)
        x[self._kept] = kept
        x[self._chosen] = self._over * (right[self._chosen] - taken)
        return x
