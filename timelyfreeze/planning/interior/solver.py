"""The program solved from the inside, for pipelines of many thousand actions.

Where HiGHS' simplex method walks along tens of thousands of edges of the feasible set, an
interior-point method needs some forty steps, each of them cheap (``newton``). It ends beside a
vertex, not on one. So what it finds is tidied up on the rows of the program, and what comes out is
held against a lower bound before it is handed on: a plan is never further from the shortest batch
than ``_MOST_ABOVE``, or there is none.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.planning.interior.mehrotra import solve_interior
from timelyfreeze.planning.interior.precedence import PrecedenceRows
from timelyfreeze.planning.interior.reduction import lower_bound, reduce_lp
from timelyfreeze.planning.program import FreezeLp, LpError

Floats = NDArray[np.float64]

# What all freezing together costs, relative to the batch without. The plan's batch is at most this
# much longer than the shortest; none that is as short freezes less.
FREEZING_PRICE = 1e-4
_TOLERANCE = 1e-7
_MOST_ABOVE = 1e-3
# Ratios this near 1 become 1 where the budget has room.
_NEARLY_ONE = 1e-3
# What every action waits in vain at the start, in units of the longest one: room for its rows.
_PAUSE = 0.5


@dataclass(frozen=True, eq=False)
class CertifiedRatios:
    """Freeze ratios, and how good they are at least.

    Attributes:
        ratios: Shape [R].
        end: P_d with these ratios, in the program's unit.
        bound: A P_d that no ratios can beat.
        n_steps: Steps of the interior-point method.
    """

    ratios: Floats
    end: float
    bound: float
    n_steps: int


def solve_by_interior_point(lp: FreezeLp, time_limit_s: float) -> Floats:
    """Minimise P_d plus a small overhead on freezing.

    Args:
        lp: The program.
        time_limit_s: Limit on the time, seconds.

    Returns:
        Ratios, shape [R].

    Raises:
        LpError: If the batch time is not within 0.1% of the optimum, certified.
    """
    deadline = time.monotonic() + time_limit_s
    found = solve_certified(lp, time_limit_s)
    if found.end > found.bound * (1.0 + _MOST_ABOVE):
        late = time.monotonic() > deadline
        raise _stopped(lp, "Time limit reached" if late else "Iteration limit reached")
    return found.ratios


def solve_certified(lp: FreezeLp, time_limit_s: float) -> CertifiedRatios:
    """Minimise P_d plus a small overhead on freezing, as far as it gets.

    Args:
        lp: The program.
        time_limit_s: Limit on the time, seconds; what has been found by then is returned.

    Returns:
        CertifiedRatios: Within all constraints, and with a lower bound on P_d.

    Raises:
        LpError: If not even a first step can be made.
    """
    deadline = time.monotonic() + time_limit_s
    schedule = PrecedenceRows(lp)
    unfrozen = _end(lp, schedule, np.zeros(len(lp.freezable)))
    ratio = slice(lp.n_actions + 1, None)
    cost = np.zeros(len(lp.column_lower))
    cost[lp.n_actions] = 1.0
    cost[ratio] = FREEZING_PRICE * unfrozen / max(float(lp.caps.sum()), 1.0)

    reduced = reduce_lp(lp)
    lp = reduced.program
    try:
        inside = solve_interior(
            reduced.rows,
            reduced.least,
            cost[reduced.free],
            start=_start(lp, schedule, reduced.fixed)[reduced.free],
            eliminate=reduced.free > lp.n_actions,
            tolerance=_TOLERANCE,
            deadline=deadline,
        )
    except (ArithmeticError, ValueError) as error:
        raise _stopped(lp, f"Numerical difficulties: {error}") from error
    x = reduced.fixed.copy()
    x[reduced.free] = inside.x
    ratios = _tidy(lp, schedule, np.clip(x[ratio], lp.column_lower[ratio], lp.column_upper[ratio]))
    overheads = reduced.row_overheads(inside.overheads, len(lp.row_lower))
    return CertifiedRatios(
        ratios=ratios,
        end=_end(lp, schedule, ratios),
        bound=_bound(lp, schedule, overheads, unfrozen),
        n_steps=inside.n_steps,
    )


def _bound(lp: FreezeLp, schedule: PrecedenceRows, overheads: Floats, unfrozen: float) -> float:
    """Return a P_d that nothing can beat, from overheads of the rows near their optimum."""
    overheads = overheads.copy()
    overheads[: lp.n_precedence] = schedule.raised(np.maximum(overheads[: lp.n_precedence], 0.0))
    cost = np.zeros(len(lp.column_lower))
    cost[lp.n_actions] = 1.0
    # What arrives at P_d may be what P_d costs, and no more.
    row_of = np.repeat(np.arange(len(overheads)), np.diff(lp.row_start))
    at_end = lp.columns == lp.n_actions
    arriving = float(lp.values[at_end] @ overheads[row_of[at_end]])
    return lower_bound(lp, cost, overheads / arriving, unfrozen) if arriving > 0.0 else 0.0


def _start(lp: FreezeLp, schedule: PrecedenceRows, fixed: Floats) -> Floats:
    """Return a point that keeps every row and bound with room to spare."""
    ratios = fixed[lp.n_actions + 1 :].copy()
    may_move = _may_move(lp)
    for budget, cap in zip(_budgets(lp), lp.caps, strict=True):
        moving = budget[may_move[budget]]
        if len(moving):
            fraction = (cap - ratios[budget].sum()) / len(moving)
            ratios[moving] = 0.5 * min(1.0, fraction)
    times = schedule.earliest(ratios, pause=_PAUSE)
    times[-1] = max(times[-1], _end(lp, schedule, ratios)) + _PAUSE
    return np.concatenate([times, ratios])


def _end(lp: FreezeLp, schedule: PrecedenceRows, ratios: Floats) -> float:
    """Return the least P_d for these ratios."""
    end = float(schedule.earliest(ratios)[-1])
    for row in range(lp.n_precedence + lp.n_stages, len(lp.row_lower)):
        inside = slice(lp.row_start[row], lp.row_start[row + 1])
        coefficients = np.zeros(len(lp.column_lower))
        coefficients[lp.columns[inside]] = lp.values[inside]
        saved = coefficients[lp.n_actions + 1 :] @ ratios
        end = max(end, (lp.row_lower[row] - saved) / coefficients[lp.n_actions])
    return end


def _tidy(lp: FreezeLp, schedule: PrecedenceRows, ratios: Floats) -> Floats:
    """Move ratios from beside 0 and 1 onto it; the batch ends no later, and no budget is broken."""
    if len(lp.row_lower) > lp.n_precedence + lp.n_stages:
        return ratios  # ranks share processors: time on any of them may be what counts
    may_move = _may_move(lp)
    ratios = schedule.unfreeze(ratios, may_move)
    for budget, cap in zip(_budgets(lp), lp.caps, strict=True):
        near = budget[may_move[budget] & (ratios[budget] > 1.0 - _NEARLY_ONE)]
        near = near[np.argsort(-ratios[near], kind="stable")]
        fits = np.cumsum(1.0 - ratios[near]) <= cap - ratios[budget].sum()
        ratios[near[fits]] = 1.0
    return schedule.unfreeze(ratios, may_move)


def _budgets(lp: FreezeLp) -> list[NDArray[np.int64]]:
    """Return the ratios that each stage's budget counts."""
    rows = range(lp.n_precedence, lp.n_precedence + lp.n_stages)
    return [
        lp.columns[lp.row_start[row] : lp.row_start[row + 1]].astype(np.int64) - lp.n_actions - 1
        for row in rows
    ]


def _may_move(lp: FreezeLp) -> NDArray[np.bool_]:
    ratio = slice(lp.n_actions + 1, None)
    return lp.column_lower[ratio] < lp.column_upper[ratio]


def _stopped(lp: FreezeLp, status: str) -> LpError:
    return LpError(
        f"the freeze-ratio program (interior point) ended with status {status!r}, not within "
        f"{_MOST_ABOVE:.1%} of the optimum; it has A={lp.n_actions} actions, E={lp.n_edges} edges, "
        f"S={lp.n_stages} stages",
        status=status,
    )
