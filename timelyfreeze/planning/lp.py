"""Solves the linear program from duration bounds to freeze ratios.

Implements arXiv:2602.05754, Sec. 3.2.2: Eq. 6 under constraints [1] to [4]. Notation: A actions,
S stages, R freezable actions.
"""

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.planning.interior_point import solve_by_interior_point
from timelyfreeze.planning.plan import FreezePlan, plan_from_ratios
from timelyfreeze.planning.program import FreezeLp, LpError, PrecedenceRows, build_lp
from timelyfreeze.schedule import PipelineDag
from timelyfreeze.timing import DurationBounds, shared_processors

logger = logging.getLogger(__name__)
_say_once = cache(logger.info)  # which keeps it from being said again

# Ratios this near 0 or 1 are 0 or 1. The solver places a vertex within its tolerance divided by
# the relative span of the action; a fraction of 1e-7 of a stage's elements is less than one tensor.
_RATIO_TOLERANCE = 1e-7
# Up to here the simplex method is the faster one, or takes a few tenths of a second at most.
MAX_ACTIONS_BY_SIMPLEX = 1024


def solve_freeze_ratios(
    dag: PipelineDag,
    bounds: DurationBounds,
    *,
    max_freeze_ratio: float | Sequence[float],
    whole_stages: Collection[int] = (),
    n_processors: float | None = None,
    time_limit_s: float = 60.0,
    skips_grads: bool = False,
) -> FreezePlan:
    """Choose the freeze ratios of backwards for the shortest batch.

    Solves Eq. 6 of arXiv:2602.05754 under constraints [1] to [4]. Of all plans with the least batch
    time, a plan with least freezing is returned. The paper weighs both goals by a small lambda;
    here they are solved one after the other, first P_d, then the sum of ratios with P_d held at its
    optimum, so that no weight has to be chosen against the solver's tolerance.

    Above 1,024 actions clarabel solves the program (``interior_point``): the batch time is then
    certified to be within 0.1% of the least, and freezing up to the caps costs 0.01% of the
    unfrozen batch.

    Args:
        dag: Precedence graph of A actions.
        bounds: ``min_ms`` and ``max_ms``, shape [A], milliseconds.
        max_freeze_ratio: Cap r_max on the mean ratio of each stage's freezable actions, in [0, 1];
            one number, or one per stage.
        whole_stages: Stages with actions frozen whole or not at all. A fraction would be a
            probability there, and a batch with actions sometimes late is late more often than
            early; so their ratios are 0 or 1 and the promise is for every batch.
        n_processors: Number of ranks computing at once, if ranks share the cores of a CPU;
            durations are then processor times. None for a device per rank.
        time_limit_s: Limit on the time of a solve, seconds.
        skips_grads: Whether useless backwards take no time in the plan. The ratios are the same.
            The first stage must be a whole stage then.

    Returns:
        FreezePlan: Ratios, and the resulting durations, start times and batch time.

    Raises:
        ValueError: As ``build_lp``, or if ``time_limit_s`` is not positive.
        LpError: If the solver stops short of an optimum; carries its status.

    Example:
        >>> from timelyfreeze import build_dag, parse_order, uniform_bounds
        >>> dag = build_dag(parse_order(["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]))
        >>> bounds = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
        >>> plan = solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.5)
        >>> plan.batch_ms, [str(a) for a, r in zip(dag.actions, plan.ratios) if r > 0.5]
        (7.0, ['0B1', '1B0'])
    """
    if not time_limit_s > 0.0:
        raise ValueError(f"time_limit_s is {time_limit_s}; it must be positive")
    lp = build_lp(dag, bounds, max_freeze_ratio, n_processors)
    raw = _solve(lp, time_limit_s)
    is_fraction = (raw > _RATIO_TOLERANCE) & (raw < 1.0 - _RATIO_TOLERANCE)
    undecided = is_fraction & np.isin(dag.stages[lp.freezable], list(whole_stages))
    if undecided.any():
        raw = _solve(_decide(lp, dag, raw, whole_stages), time_limit_s)
    violation = float(max(-raw.min(initial=0.0), raw.max(initial=0.0) - 1.0))
    if violation >= 1e-6:
        raise LpError(
            f"a ratio that the solver calls optimal breaks its bounds by {violation:.2g}",
            status="Optimal",
        )
    found = np.where(raw < _RATIO_TOLERANCE, 0.0, np.where(raw > 1.0 - _RATIO_TOLERANCE, 1.0, raw))

    def plan_of(found: NDArray[np.float64]) -> FreezePlan:
        ratios = np.zeros(lp.n_actions)
        ratios[lp.freezable] = found
        return plan_from_ratios(
            dag, bounds, ratios, n_processors=n_processors, skips_grads=skips_grads
        )

    # Of those that were rounded, what does not shorten the batch is frozen in vain.
    if shared_processors(dag, n_processors) is None:
        return plan_of(PrecedenceRows(lp).unfreeze(found, undecided, whole=True))
    plan = plan_of(found)
    for k in np.flatnonzero(undecided):
        other = plan_of(np.where(np.arange(len(found)) == k, 0.0, found))
        if other.batch_ms <= plan.batch_ms:
            found[k], plan = 0.0, other
    return plan


def _solve(lp: FreezeLp, time_limit_s: float) -> NDArray[np.float64]:
    """Return the R ratios: by HiGHS if quick, else by clarabel if installed."""
    deadline, left_s = time.monotonic() + time_limit_s, time_limit_s
    if lp.n_actions > MAX_ACTIONS_BY_SIMPLEX:
        try:
            return solve_by_interior_point(lp, time_limit_s).ratios
        except ImportError as error:
            _say_once(
                "a large pipeline is solved faster with `pip install clarabel` (%s)", str(error)
            )
        except LpError as error:
            left_s = deadline - time.monotonic()
            if left_s <= 0.0:
                raise
            logger.warning("%s; the simplex method has %.0f s left", error, left_s)
    try:
        from timelyfreeze.planning.simplex import solve_by_simplex
    except ImportError as error:  # training can go on without it, so it is imported no sooner
        raise LpError(
            f"the solver highspy cannot be imported ({error}); scripts/setup.sh installs it",
            status="No solver",
        ) from error
    return solve_by_simplex(lp, left_s)


def _decide(
    lp: FreezeLp, dag: PipelineDag, raw: NDArray[np.float64], whole_stages: Collection[int]
) -> FreezeLp:
    """Fix the ratios of ``whole_stages`` at 0 or 1: 1 where above 0, as far as the cap allows.

    The highest come first. Freezing more never makes a batch longer, so only a cap can make the
    batch time rise.
    """
    lower, upper = lp.column_lower.copy(), lp.column_upper.copy()
    for stage in whole_stages:
        of_stage = np.flatnonzero(dag.stages[lp.freezable] == stage)
        ratios = raw[of_stage]
        n_frozen = min(
            int((ratios > _RATIO_TOLERANCE).sum()), int(lp.caps[stage] + _RATIO_TOLERANCE)
        )
        values = np.zeros(len(of_stage))
        values[np.argsort(-ratios, kind="stable")[:n_frozen]] = 1.0
        columns = lp.n_actions + 1 + of_stage
        lower[columns] = upper[columns] = values
    return replace(lp, column_lower=lower, column_upper=upper)
