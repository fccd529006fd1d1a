"""Brings the program into the form that an interior-point method needs: rows G x >= h, an inside.

Rows that hold whatever the columns do are left out. Rows that hold at one corner only (a budget of
0) fix their columns, as equal bounds do; fixed columns move to the right side. Bounds of the
columns that remain become rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.planning.interior.rows import Rows
from timelyfreeze.planning.program import FreezeLp

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# A sum of a few thousand ratios is this far from exact, relatively.
_ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class ReducedLp:
    """G x >= h in the columns that can move.

    Attributes:
        rows: G: rows of the program, turned to be lower bounds, then bounds of columns.
        least: h.
        program: The program, with equal bounds for every column that cannot move.
        free: Columns of the program that can move, in the order of the columns of ``rows``.
        fixed: Value of every column of the program; 0 where it can move.
        row: Row of the program behind each of the first rows of ``rows``.
        sign: 1, or -1 where the row was turned.
    """

    rows: Rows
    least: Floats
    program: FreezeLp
    free: Ints
    fixed: Floats
    row: Ints
    sign: Floats

    def row_overheads(self, overheads: Floats, n_rows: int) -> Floats:
        """Return overheads of the program's ``n_rows`` rows, below 0 for an upper bound."""
        of_program = np.zeros(n_rows)
        of_program[self.row] = self.sign * overheads[: len(self.row)]
        return of_program


def reduce_lp(lp: FreezeLp) -> ReducedLp:
    """Bring ``lp`` into the form G x >= h.

    Args:
        lp: A program whose rows have one bound each, and whose columns have a lower one.

    Returns:
        ReducedLp: The same set of solutions, without what is decided already.
    """
    n_rows, n_columns = len(lp.row_lower), len(lp.column_lower)
    row_of = np.repeat(np.arange(n_rows), np.diff(lp.row_start))
    sign = np.where(np.isfinite(lp.row_lower), 1.0, -1.0)
    assert (np.isfinite(lp.row_lower) != np.isfinite(lp.row_upper)).all()
    assert np.isfinite(lp.column_lower).all()
    least = np.where(sign > 0.0, lp.row_lower, -lp.row_upper)
    values = lp.values * sign[row_of]

    # What each row can reach, and must at least.
    rising = values > 0.0
    high = np.where(rising, lp.column_upper[lp.columns], lp.column_lower[lp.columns])
    low = np.where(rising, lp.column_lower[lp.columns], lp.column_upper[lp.columns])
    with np.errstate(invalid="ignore"):
        max_reached = np.bincount(row_of, values * high, n_rows)
        min_reached = np.bincount(row_of, values * low, n_rows)
    room = _ROUNDING * np.maximum(np.abs(least), 1.0)
    holds = min_reached >= least - room
    corner = ~holds & (max_reached <= least + room)
    lower, upper = lp.column_lower.copy(), lp.column_upper.copy()
    at_corner = corner[row_of]
    lower[lp.columns[at_corner]] = upper[lp.columns[at_corner]] = high[at_corner]

    free = np.flatnonzero(lower < upper)
    is_free = lower < upper
    fixed = np.where(is_free, 0.0, lower)
    least = least - np.bincount(row_of, values * fixed[lp.columns], n_rows)
    stays = is_free[lp.columns] & ~(holds | corner)[row_of]
    row, columns, values = row_of[stays], lp.columns[stays], values[stays]
    kept = np.flatnonzero(np.bincount(row, minlength=n_rows))
    place = np.zeros(n_columns, dtype=np.int64)
    place[free] = np.arange(len(free))
    bounded = np.flatnonzero(np.isfinite(upper[free]))
    rows = Rows(
        np.concatenate(
            [
                np.cumsum(np.append(0, np.bincount(row, minlength=n_rows)[kept])),
                len(row) + 1 + np.arange(len(free) + len(bounded)),
            ]
        ),
        np.concatenate([place[columns], np.arange(len(free)), bounded]),
        np.concatenate([values, np.ones(len(free)), -np.ones(len(bounded))]),
        len(free),
    )
    return ReducedLp(
        rows=rows,
        least=np.concatenate([least[kept], lower[free], -upper[free[bounded]]]),
        program=replace(lp, column_lower=lower, column_upper=upper),
        free=free,
        fixed=fixed,
        row=kept,
        sign=sign[kept],
    )


def lower_bound(lp: FreezeLp, cost: Floats, overheads: Floats, latest: float) -> float:
    """Return what the cost cannot fall below, by weak duality.

    Holds for any overheads, be they good or bad: whatever computed them needs no trust. With overheads
    of an optimum it is the optimum.

    Args:
        lp: The program.
        cost: c, shape [columns].
        overheads: Shape [rows]; above 0 for a lower bound of a row, below 0 for an upper one.
        latest: A time that no column without an upper bound needs to exceed; the end of a batch
            without freezing.

    Returns:
        float: A lower bound of c'x over all solutions of the program.
    """
    lower = np.where(np.isfinite(lp.row_lower), lp.row_lower, 0.0)
    upper = np.where(np.isfinite(lp.row_upper), lp.row_upper, 0.0)
    overheads = np.where(np.isfinite(lp.row_lower), np.maximum(overheads, 0.0), 0.0) + np.where(
        np.isfinite(lp.row_upper), np.minimum(overheads, 0.0), 0.0
    )
    row_of = np.repeat(np.arange(len(lower)), np.diff(lp.row_start))
    rest = cost - np.bincount(lp.columns, lp.values * overheads[row_of], len(cost))
    most = np.where(np.isfinite(lp.column_upper), lp.column_upper, latest)
    paid = np.where(overheads > 0.0, lower, upper) @ overheads
    return float(paid + np.minimum(rest * lp.column_lower, rest * most).sum())
