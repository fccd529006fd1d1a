"""What no plan can beat: a lower bound on P_d that trusts no solver.

By weak duality any numbers, one for each row of the program, give a bound that holds. How close it
comes depends on how close they are to the dual values of an optimum.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.planning.program import FreezeLp, PrecedenceRows

Floats = NDArray[np.float64]


def lower_bound(lp: FreezeLp, duals: Floats, latest: float) -> float:
    """Return what P_d cannot fall below: the optimum if ``duals`` are those of an optimum.

    Duals, shape [rows], are above 0 for a lower bound of a row, below 0 for an upper one; those of
    the other sign count for nothing. ``latest`` is a time that no start time needs to exceed; P_d
    without freezing.
    """
    has_lower = np.isfinite(lp.row_lower)
    used = np.where(has_lower, np.maximum(duals, 0.0), np.minimum(duals, 0.0))
    total = np.where(has_lower, lp.row_lower, lp.row_upper) @ used
    rest = -np.bincount(lp.columns, lp.values * used[_row_of(lp)], len(lp.column_lower))
    rest[lp.n_actions] += 1.0  # the cost is P_d
    most = np.where(np.isfinite(lp.column_upper), lp.column_upper, latest)
    return float(total + np.minimum(rest * lp.column_lower, rest * most).sum())


def improved_lower_bound(lp: FreezeLp, rows: PrecedenceRows, duals: Floats, latest: float) -> float:
    """Return ``lower_bound`` of duals that are nearly optimal, moved to where they lose least."""
    duals = duals.copy()
    duals[: lp.n_precedence] = rows.raised(np.maximum(duals[: lp.n_precedence], 0.0))
    # What arrives at P_d may be what P_d costs, and no more.
    at_end = lp.columns == lp.n_actions
    arriving = float(lp.values[at_end] @ duals[_row_of(lp)[at_end]])
    return lower_bound(lp, duals / arriving, latest) if arriving > 0.0 else 0.0


def _row_of(lp: FreezeLp) -> NDArray[np.int64]:
    """Return the row of each nonzero."""
    return np.repeat(np.arange(len(lp.row_lower)), np.diff(lp.row_start))
