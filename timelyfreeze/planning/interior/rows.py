"""A sparse matrix by rows, with what an interior-point method asks of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Rows:
    """A sparse matrix by rows, with no empty row and no column twice in a row.

    Attributes:
        start: int64, shape [rows + 1]. Where each row begins in the next two.
        columns: int64. Column of each nonzero.
        values: float64. The nonzeros.
        n_columns: n.
    """

    start: Ints
    columns: Ints
    values: Floats
    n_columns: int

    @cached_property
    def row_of(self) -> Ints:
        """Row of each nonzero."""
        return np.repeat(np.arange(len(self.start) - 1), np.diff(self.start))

    def times(self, x: Floats) -> Floats:
        """Return G x."""
        return added(self.row_of, self.values * x[self.columns], len(self.start) - 1)

    def transposed_times(self, y: Floats) -> Floats:
        """Return G' y."""
        return added(self.columns, self.values * y[self.row_of], self.n_columns)

    def select(self, keep: NDArray[np.bool_]) -> Rows:
        """Return the rows where ``keep`` is true."""
        lengths = np.diff(self.start)
        inside = np.repeat(keep, lengths)
        return Rows(
            np.concatenate([[0], np.cumsum(lengths[keep])]),
            self.columns[inside],
            self.values[inside],
            self.n_columns,
        )


def added(places: Ints, amounts: Floats, n_places: int) -> Floats:
    """Return the sum of the ``amounts`` at each of ``n_places`` places."""
    # Without amounts, numpy returns integers.
    return np.bincount(places, amounts, n_places).astype(np.float64, copy=False)


def pairs(start: Ints) -> tuple[Ints, Ints, Ints]:
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
