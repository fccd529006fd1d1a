"""The program solved by the interior-point method of clarabel, for many thousand actions.

The simplex method makes tens of thousands of steps there, an interior-point method 40 to 100. The
answer lies beside a vertex, not on a vertex. So ratios are moved onto 0 and 1 where this costs no
time, and the batch is compared with a lower bound independent of the solver. A plan is at most
``_MAX_ABOVE`` longer than the shortest batch, or there is none. By weak duality any numbers, one
per row of the program, give a valid bound; the bound is close for numbers close to the dual values
of an optimum.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.planning.program import Floats, FreezeLp, LpError, PrecedenceRows

# What all freezing together costs, relative to the batch without. The plan's batch is at most this
# much longer than the shortest; none that is as short freezes less.
FREEZING_COST = 1e-4
_TOLERANCE = 1e-7
# How far each step's linear system is solved at least. clarabel's own 1e-13 is out of reach, so
# that each is solved several times over: half of all time, for the same number of steps.
_REFINED_TO = 1e-6
_MAX_ABOVE = 1e-3
# Ratios this near 1 become 1 where the budget has room.
_NEARLY_ONE = 1e-3


@dataclass(frozen=True, eq=False)
class CertifiedRatios:
    """Freeze ratios, and how good they are at least."""

    ratios: Floats  # shape [R]
    end: float  # P_d with these ratios, in the program's unit
    bound: float  # a P_d that no ratios can beat


def solve_by_interior_point(lp: FreezeLp, time_limit_s: float) -> CertifiedRatios:
    """Minimise P_d plus a small cost of freezing, within all constraints.

    The solver's state at the time limit counts. A P_d not certified within 0.1% of the optimum is
    an LpError.
    """
    rows = PrecedenceRows(lp)
    unfrozen = _end(lp, rows, np.zeros(len(lp.freezable)))
    x, duals, status = _minimise(lp, unfrozen, time_limit_s)
    if not (np.isfinite(x).all() and np.isfinite(duals).all()):
        raise _stopped(lp, status)
    ratios = _tidy(lp, rows, _within_budgets(lp, x[lp.n_actions + 1 :]))
    end, bound = _end(lp, rows, ratios), improved_lower_bound(lp, rows, duals, unfrozen)
    if not end <= bound * (1.0 + _MAX_ABOVE):
        raise _stopped(lp, status)
    return CertifiedRatios(ratios, end, bound)


def _minimise(lp: FreezeLp, unfrozen: float, time_limit_s: float) -> tuple[Floats, Floats, str]:
    """Return columns, dual values of the rows, and clarabel's final status.

    ``unfrozen`` is P_d without freezing.
    """
    import clarabel
    from scipy import sparse

    cost = np.zeros(len(lp.column_lower))  # P_d, and a little for freezing
    cost[lp.n_actions] = 1.0
    cost[lp.n_actions + 1 :] = FREEZING_COST * unfrozen / max(float(lp.caps.sum()), 1.0)
    # clarabel wants G x <= h. Columns that cannot move go to the right side.
    free = np.flatnonzero(lp.column_lower < lp.column_upper)
    x = np.where(lp.column_lower < lp.column_upper, 0.0, lp.column_lower)
    sign = np.where(np.isfinite(lp.row_lower), -1.0, 1.0)
    shape = len(lp.row_lower), len(lp.column_lower)
    values = lp.values * np.repeat(sign, np.diff(lp.row_start))
    matrix = sparse.csr_matrix((values, lp.columns, lp.row_start), shape)
    right = np.where(sign < 0.0, -lp.row_lower, lp.row_upper) - matrix @ x
    has_upper = np.isfinite(lp.column_upper[free])
    # What waits for another action starts at 0 or later in any case.
    has_lower = ~np.isin(free, lp.after)
    unit = sparse.identity(len(free), format="csr")
    g = sparse.vstack([matrix[:, free], -unit[has_lower], unit[has_upper]], format="csc")
    h = np.concatenate([right, -lp.column_lower[free][has_lower], lp.column_upper[free][has_upper]])

    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.direct_solve_method = "faer"
    settings.max_threads = 1
    settings.iterative_refinement_reltol = settings.iterative_refinement_abstol = _REFINED_TO
    settings.time_limit = time_limit_s
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = _TOLERANCE
    quadratic = sparse.csc_matrix((len(free), len(free)))
    cones = [clarabel.NonnegativeConeT(len(h))]
    try:
        answer = clarabel.DefaultSolver(quadratic, cost[free], g, h, cones, settings).solve()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # clarabel has no narrower class, and a panic is no Exception
        raise _stopped(lp, f"Numerical difficulties: {error}") from error
    x[free] = answer.x
    return x, -sign * np.array(answer.z)[: shape[0]], str(answer.status)


def _end(lp: FreezeLp, rows: PrecedenceRows, ratios: Floats) -> float:
    """Return the least P_d for these ratios."""
    end = float(rows.earliest(ratios)[-1])
    if len(lp.row_lower) > lp.n_precedence + lp.n_stages:
        # Ranks share processors: the last row has what each ratio saves of all work, and then P_d.
        *_, begin, _ = lp.row_start
        saved, n_processors = lp.values[begin:-1] @ ratios, lp.values[-1]
        end = max(end, (lp.row_lower[-1] - saved) / n_processors)
    return end


def _within_budgets(lp: FreezeLp, ratios: Floats) -> Floats:
    """Reduce ratios beyond their bounds and budgets by the solver's tolerance."""
    ratio = slice(lp.n_actions + 1, None)
    lower = lp.column_lower[ratio]
    ratios = np.clip(ratios, lower, lp.column_upper[ratio])
    for budget, cap in zip(_budgets(lp), lp.caps, strict=True):
        above, room = (ratios - lower)[budget], cap - lower[budget].sum()
        if above.sum() > room:
            ratios[budget] = lower[budget] + above * max(room, 0.0) / above.sum()
    return ratios


def _tidy(lp: FreezeLp, rows: PrecedenceRows, ratios: Floats) -> Floats:
    """Move ratios from beside 0 and 1 onto it; the batch ends no later, and no budget is broken."""
    if len(lp.row_lower) > lp.n_precedence + lp.n_stages:
        return ratios  # ranks share processors: time on any of them may be what counts
    ratio = slice(lp.n_actions + 1, None)
    may_move = lp.column_lower[ratio] < lp.column_upper[ratio]
    ratios = rows.unfreeze(ratios, may_move)
    for budget, cap in zip(_budgets(lp), lp.caps, strict=True):
        near = budget[may_move[budget] & (ratios[budget] > 1.0 - _NEARLY_ONE)]
        near = near[np.argsort(-ratios[near], kind="stable")]
        fits = np.cumsum(1.0 - ratios[near]) <= cap - ratios[budget].sum()
        ratios[near[fits]] = 1.0
    return rows.unfreeze(ratios, may_move)


def _budgets(lp: FreezeLp) -> list[NDArray[np.int64]]:
    """Return the ratios counted by the stages' budgets."""
    return [
        lp.columns[lp.row_start[row] : lp.row_start[row + 1]].astype(np.int64) - lp.n_actions - 1
        for row in range(lp.n_precedence, lp.n_precedence + lp.n_stages)
    ]


def _stopped(lp: FreezeLp, status: str) -> LpError:
    status = "Time limit reached" if status == "MaxTime" else status
    return lp.stopped("interior point", status, f"not within {_MAX_ABOVE:.1%} of the optimum")


def lower_bound(lp: FreezeLp, duals: Floats, latest: float) -> float:
    """Return a lower bound of P_d: the optimum if ``duals`` are those of an optimum.

    Duals, shape [rows], are above 0 for a lower bound of a row, below 0 for an upper one; duals of
    the other sign count for nothing. ``latest`` is an upper limit of start times: P_d without
    freezing.
    """
    has_lower = np.isfinite(lp.row_lower)
    used = np.where(has_lower, np.maximum(duals, 0.0), np.minimum(duals, 0.0))
    total = np.where(has_lower, lp.row_lower, lp.row_upper) @ used
    rest = -np.bincount(lp.columns, lp.values * used[_row_of(lp)], len(lp.column_lower))
    rest[lp.n_actions] += 1.0  # the cost is P_d
    most = np.where(np.isfinite(lp.column_upper), lp.column_upper, latest)
    return float(total + np.minimum(rest * lp.column_lower, rest * most).sum())


def improved_lower_bound(lp: FreezeLp, rows: PrecedenceRows, duals: Floats, latest: float) -> float:
    """Return ``lower_bound`` of nearly optimal duals, moved to lose least."""
    duals = duals.copy()
    duals[: lp.n_precedence] = rows.raised(np.maximum(duals[: lp.n_precedence], 0.0))
    # What arrives at P_d may be what P_d costs, and no more.
    at_end = lp.columns == lp.n_actions
    arriving = float(lp.values[at_end] @ duals[_row_of(lp)[at_end]])
    return lower_bound(lp, duals / arriving, latest) if arriving > 0.0 else 0.0


def _row_of(lp: FreezeLp) -> NDArray[np.int64]:
    """Return the row of all nonzeros."""
    return np.repeat(np.arange(len(lp.row_lower)), np.diff(lp.row_start))
