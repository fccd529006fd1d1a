"""Solves the linear program that turns duration bounds into freeze ratios.

Implements arXiv:2602.05754, Sec. 3.2.2: Eq. 6 under constraints [1] to [4]. Notation: A actions,
S stages, R freezable actions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.planning.interior_point import solve_by_interior_point
from timelyfreeze.planning.plan import FreezePlan, plan_from_ratios
from timelyfreeze.planning.precedence import PrecedenceRows
from timelyfreeze.planning.program import FreezeLp, LpError, build_lp
from timelyfreeze.planning.skipped_grads import shortened, skip_depths
from timelyfreeze.schedule import PipelineDag
from timelyfreeze.settings import OFF, PLAN
from timelyfreeze.timing import DurationBounds, shared_processors, validate_bounds

__all__ = ["FreezeLp", "LpError", "build_lp", "solve_freeze_ratios"]

logger = logging.getLogger(__name__)

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
    skip_input_grads: str = OFF,
) -> FreezePlan:
    """Choose how much of each backward to freeze so that the batch ends soonest.

    Solves Eq. 6 of arXiv:2602.05754 under constraints [1] to [4]. Of all plans with the least
    batch time, one that freezes least is returned. The paper weighs the two goals by a small
    lambda; here they are solved one after the other, first P_d, then the sum of ratios with P_d
    held at its optimum, so that no weight has to be chosen against the solver's tolerance.

    Above 1,024 actions clarabel solves the program (``interior_point``): the batch time is then
    certified to be within 0.1% of the least, and freezing all that the caps allow costs 0.01% of
    the unfrozen batch.

    Args:
        dag: Precedence graph of A actions.
        bounds: ``min_ms`` and ``max_ms``, shape [A], milliseconds.
        max_freeze_ratio: Cap r_max on the mean ratio of each stage's freezable actions, in [0, 1];
            one number, or one per stage.
        whole_stages: Stages of which an action is frozen whole or not at all. A fraction would be
            a probability there, and a batch whose actions are sometimes late is late more often
            than it is early; so their ratios are 0 or 1 and the promise is for every batch.
        n_processors: How many ranks can compute at once, for ranks that share the cores of a CPU;
            durations are then processor times. None if each rank has a device of its own.
        time_limit_s: Limit on the time of each solve, seconds.
        skip_input_grads: One of ``settings.SKIP_INPUT_GRADS``. With ``"use"`` backwards that nobody
            needs take no time in the plan; with ``"plan"`` it looks for microbatches in which they
            are many (``skip_program``), up to 1,024 actions. The first stage must be a whole one
            then.

    Returns:
        FreezePlan: Ratios, and the durations, start times and batch time that follow from them.

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
    validate_bounds(dag, bounds)
    problem = _Problem(
        dag,
        bounds,
        max_freeze_ratio,
        whole_stages,
        n_processors,
        time_limit_s,
        skip_input_grads != OFF,
    )
    plan = problem.solve({})
    if skip_input_grads != PLAN or len(dag.actions) > MAX_ACTIONS_BY_SIMPLEX:
        return plan
    lp = build_lp(dag, bounds, max_freeze_ratio, n_processors)
    with _needing_highs():
        from timelyfreeze.planning.skip_program import choose_skip_depths
    depths = choose_skip_depths(lp, dag, bounds, time_limit_s)
    if not depths:
        return plan
    other = problem.without_vain_skips(problem.solve(depths))
    return other if other.batch_ms < plan.batch_ms else plan


@dataclass(frozen=True, eq=False)
class _Problem:
    """What :func:`solve_freeze_ratios` was asked, to be solved for given skip depths."""

    dag: PipelineDag
    bounds: DurationBounds
    max_freeze_ratio: float | Sequence[float]
    whole_stages: Collection[int]
    n_processors: float | None
    time_limit_s: float
    skips_grads: bool

    def plan(self, ratios: NDArray[np.float64]) -> FreezePlan:
        return plan_from_ratios(
            self.dag,
            self.bounds,
            ratios,
            n_processors=self.n_processors,
            skips_grads=self.skips_grads,
        )

    def solve(self, depths: Mapping[int, int]) -> FreezePlan:
        """Return the best plan with these skip depths; with none, those that come out."""
        dag = self.dag
        bounds = shortened(dag, self.bounds, depths)
        lp = build_lp(dag, bounds, self.max_freeze_ratio, self.n_processors)
        if depths:
            lp = _with_skips(lp, dag, depths)
        raw = _solve(lp, self.time_limit_s)
        is_fraction = (raw > _RATIO_TOLERANCE) & (raw < 1.0 - _RATIO_TOLERANCE)
        undecided = [
            i
            for i in np.flatnonzero(is_fraction).tolist()
            if dag.stages[lp.freezable[i]] in self.whole_stages
        ]
        if undecided:
            raw = _solve(_decide(lp, dag, raw, self.whole_stages), self.time_limit_s)
        violation = float(max(-raw.min(initial=0.0), raw.max(initial=0.0) - 1.0))
        if violation >= 1e-6:
            raise LpError(
                f"a ratio that the solver calls optimal breaks its bounds by {violation:.2g}",
                status="Optimal",
            )
        ratios = np.zeros(lp.n_actions)
        ratios[lp.freezable] = np.where(
            raw < _RATIO_TOLERANCE, 0.0, np.where(raw > 1.0 - _RATIO_TOLERANCE, 1.0, raw)
        )
        return self._without_vain(lp, ratios, undecided)

    def _without_vain(
        self, lp: FreezeLp, ratios: NDArray[np.float64], rounded: Sequence[int]
    ) -> FreezePlan:
        """Return the plan without those of the ``rounded`` ratios that do not shorten the batch."""
        if shared_processors(self.dag, self.n_processors) is None:
            may_fall = np.zeros(len(lp.freezable), dtype=np.bool_)
            may_fall[rounded] = True
            kept = PrecedenceRows(lp).unfreeze(ratios[lp.freezable], may_fall, whole=True)
            ratios = ratios.copy()
            ratios[lp.freezable] = kept
            return self.plan(ratios)
        plan = self.plan(ratios)
        for i in lp.freezable[rounded]:
            plan = self._if_no_longer(plan, i)
        return plan

    def without_vain_skips(self, plan: FreezePlan) -> FreezePlan:
        """Return the plan without the last skipped stages that do not shorten the batch."""
        backward = {
            (a.stage, a.microbatch): i for i, a in enumerate(self.dag.actions) if a.kind.freezable
        }
        for microbatch, depth in skip_depths(self.dag, plan.ratios).items():
            for stage in reversed(range(1, depth)):
                shorter = self._if_no_longer(plan, backward[stage, microbatch])
                if shorter is plan:
                    break
                plan = shorter
        return plan

    def _if_no_longer(self, plan: FreezePlan, i: int) -> FreezePlan:
        """Return the plan with action ``i`` unfrozen, if the batch is no longer; else ``plan``."""
        other = self.plan(np.where(np.arange(len(self.dag.actions)) == i, 0.0, plan.ratios))
        return other if other.batch_ms <= plan.batch_ms else plan


def _solve(lp: FreezeLp, time_limit_s: float) -> NDArray[np.float64]:
    """Return the R ratios: by HiGHS where that is quick, else by clarabel if it is there."""
    if lp.n_actions <= MAX_ACTIONS_BY_SIMPLEX:
        return _simplex(lp, time_limit_s)
    deadline = time.monotonic() + time_limit_s
    try:
        return solve_by_interior_point(lp, time_limit_s)
    except ImportError as error:
        _recommend_clarabel(str(error))
        return _simplex(lp, time_limit_s)
    except LpError as error:
        left_s = deadline - time.monotonic()
        if left_s <= 0.0:
            raise
        logger.warning("%s; the simplex method has %.0f s left", error, left_s)
        return _simplex(lp, left_s)


@cache
def _recommend_clarabel(problem: str) -> None:
    """Say once what is missing; the cache is what keeps it from being said again."""
    logger.info("a large pipeline is solved faster with `pip install clarabel` (%s)", problem)


def _simplex(lp: FreezeLp, time_limit_s: float) -> NDArray[np.float64]:
    with _needing_highs():
        from timelyfreeze.planning.simplex import solve_by_simplex
    return solve_by_simplex(lp, time_limit_s)


@contextmanager
def _needing_highs() -> Iterator[None]:
    """Import what needs HiGHS. Without it training can go on, so it is no error before a solve.

    Raises:
        LpError: If highspy is not there, or does not fit this machine.
    """
    try:
        yield
    except ImportError as error:
        raise LpError(
            f"the solver highspy cannot be imported ({error}); scripts/setup.sh installs it",
            status="No solver",
        ) from error


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


def _with_skips(lp: FreezeLp, dag: PipelineDag, depths: Mapping[int, int]) -> FreezeLp:
    """Fix the ratios of skipped backwards at 1, and all others of the first stage at 0."""
    lower, upper = lp.column_lower.copy(), lp.column_upper.copy()
    for k, i in enumerate(lp.freezable.tolist()):
        action = dag.actions[i]
        if action.stage < depths.get(action.microbatch, 0):
            lower[lp.n_actions + 1 + k] = 1.0
        elif action.stage == 0:
            upper[lp.n_actions + 1 + k] = 0.0
    return replace(lp, column_lower=lower, column_upper=upper)
