"""From measured times to a plan, under the cap with which a loss is reached soonest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.planning.lp import MAX_ACTIONS_BY_SIMPLEX, solve_freeze_ratios
from timelyfreeze.planning.measured import RankTimes, bounds_from_times
from timelyfreeze.planning.plan import FreezePlan, plan_from_json, plan_to_json
from timelyfreeze.schedule import (
    PipelineDag,
    ScheduleOrder,
    build_dag,
    order_from_csv,
    order_to_csv,
)
from timelyfreeze.settings import AUTO, key
from timelyfreeze.timing import DurationBounds, bounds_from_json, bounds_to_json

# Caps that are tried; a pipeline that takes long to solve has time for few.
_CAPS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8)
_FEW_CAPS = (0.1, 0.2, 0.35, 0.5)
# The estimate is flat around its best: times scatter by more than what caps differ, and what frozen
# tensors cost is a formula, not measured. So the smallest cap is taken that gives up no more of the
# best one's gain than this, times the part of gradients that is lost.
_GIVEN_UP = 0.25


@dataclass(frozen=True)
class SolverChoices:
    """What a plan is solved under: arguments of ``solve_freeze_ratios``, and ``AUTO``."""

    # cap r_max, one number or one per stage; or ``settings.AUTO``
    max_freeze_ratio: float | Sequence[float] | str
    whole_stages: tuple[int, ...] = ()  # stages that are frozen whole or not at all
    n_processors: float | None = None  # how many ranks of the pipeline can compute at once, or None
    time_limit_s: float = 60.0  # limit on the solver's time, seconds
    skips_grads: bool = False  # whether backwards that nobody needs are left out


def chosen_plan(dag: PipelineDag, bounds: DurationBounds, choices: SolverChoices) -> FreezePlan:
    """Return the plan under the cap that was chosen, or under the best one.

    The best is the one that reaches a loss soonest: with the smallest product of batch time and
    estimated number of steps (``progress``); a smaller one that gains nearly as much is preferred.
    Where no freezing pays, the plan's ``time_to_loss`` says so.
    """
    if choices.max_freeze_ratio != AUTO:
        return _plan(dag, bounds, choices)
    caps = _CAPS if len(dag.actions) <= MAX_ACTIONS_BY_SIMPLEX else _FEW_CAPS
    if bounds.captured > 0.0:  # nothing is frozen to no purpose, so all of it may be
        caps = (*caps, 1.0)
    # The limit is one on all of them: whoever waits for the plan waits no longer.
    limit_s = choices.time_limit_s / len(caps)
    each = [replace(choices, max_freeze_ratio=cap, time_limit_s=limit_s) for cap in caps]
    plans = [_plan(dag, bounds, chosen) for chosen in each]
    gains = [1.0 - (plan.time_to_loss or 0.0) for plan in plans]
    best = max(gains)
    kept = 1.0 - _GIVEN_UP * (1.0 - bounds.captured)
    enough = kept * best if best > 0.0 else best
    return next(plan for plan, gain in zip(plans, gains, strict=True) if gain >= enough)


def _plan(dag: PipelineDag, bounds: DurationBounds, choices: SolverChoices) -> FreezePlan:
    plan = solve_freeze_ratios(dag, bounds, **vars(choices))
    factor = steps_factor(dag, plan.ratios, bounds.captured, bounds.captured_mean)
    return replace(plan, steps_factor=factor)


# No mean gradient is left of a tensor that is always frozen; it learns nothing at all.
_MAX_RATIO = 0.99


def steps_factor(
    dag: PipelineDag, ratios: NDArray[np.float64], captured: float = 0.0, captured_mean: float = 0.0
) -> float:
    """Return how many times as many steps a plan takes: sqrt(1 + V), V the mean over stages.

    A batch's gradient has 1 - r (1 - c) of its energy, nearly all of it noise, and 1 - r (1 - m) of
    the mean gradient. A step that is divided by the root of that energy then moves (1 - r (1 - m))
    / sqrt(1 - r (1 - c)) as far as without freezing; V follows from that, and is never below 0.
    ``captured`` is c, ``captured_mean`` m, both in [0, 1].
    """
    return factor_of_means(_means(dag, ratios), captured, captured_mean)


def factor_of_means(means: NDArray[np.float64], captured: float, captured_mean: float) -> float:
    """Return :func:`steps_factor` for the mean ratio of each stage."""
    return math.sqrt(1.0 + float(np.maximum(_spread(means, captured, captured_mean), 0.0).mean()))


def _spread(
    means: NDArray[np.float64], captured: float, captured_mean: float
) -> NDArray[np.float64]:
    """Return V of each stage; below 0 where less noise is left than mean gradient."""
    energy, mean = (
        1.0 - np.minimum((1.0 - part) * means, _MAX_RATIO) for part in (captured, captured_mean)
    )
    return energy / mean**2 - 1.0


def _means(dag: PipelineDag, ratios: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean ratio of each stage."""
    stages = range(dag.n_stages)
    return np.array([ratios[(dag.stages == stage) & dag.freezable].mean() for stage in stages])


@dataclass(frozen=True)
class Solution:
    """A plan with all that it follows from."""

    order: ScheduleOrder
    dag: PipelineDag
    bounds: DurationBounds
    plan: FreezePlan


def solve_from_times(
    ranks: Sequence[RankTimes], declared: ScheduleOrder, choices: SolverChoices
) -> Solution:
    """Plan for what the ranks measured.

    Replicas may repeat actions. If something else ran than was ``declared``, that counts.
    """
    return solve_from_bounds(*bounds_from_times(ranks, declared, choices.n_processors), choices)


# SmolLM2 needed 1.02 to 1.09 times as many steps where the estimate was 1.00.
_UNSEEN = 0.05


def steps_error(dag: PipelineDag, plan: FreezePlan, bounds: DurationBounds) -> float | None:
    """Return the standard error of a plan's ``steps_factor``; None where it is not known.

    That of what is captured, and what runs needed beyond the estimate. V below 0 counts here: an
    estimate that is never below 1 would seem to be sure of it.
    """
    error = bounds.captured_mean_error
    if error is None:
        return None
    means = _means(dag, plan.ratios)
    around = [min(max(bounds.captured_mean + e, 0.0), 1.0) for e in (-error, error)]
    high, low = (1.0 + float(_spread(means, bounds.captured, each).mean()) for each in around)
    return math.hypot((math.sqrt(high) - math.sqrt(max(low, 0.0))) / 2.0, _UNSEEN)


def solve_from_bounds(
    order: ScheduleOrder, bounds: DurationBounds, choices: SolverChoices
) -> Solution:
    """Plan for bounds that are known; errors as for :func:`solve_from_times`."""
    dag = build_dag(order)
    return Solution(order, dag, bounds, chosen_plan(dag, bounds, choices))


def solution_to_plain(solution: Solution) -> dict[str, str]:
    """Return the solution as texts, to be sent or saved; undone by ``solution_from_plain``."""
    return {
        "order": order_to_csv(solution.order),
        "bounds": bounds_to_json(solution.dag, solution.bounds),
        "plan": plan_to_json(solution.plan),
    }


def solution_from_plain(plain: Mapping[str, str]) -> Solution:
    """Return what ``solution_to_plain`` was given."""
    order = order_from_csv(plain["order"])
    dag = build_dag(order)
    bounds = bounds_from_json(dag, plain["bounds"])
    return Solution(order, dag, bounds, plan_from_json(plain["plan"]))


def check_same_pipeline(planned: ScheduleOrder, declared: ScheduleOrder) -> None:
    """Refuse a saved plan of another pipeline; another order of the same actions will do."""
    theirs = {action for rank in planned.ranks for action in rank}
    ours = {action for rank in declared.ranks for action in rank}
    if theirs != ours:
        raise ValueError(
            f"the checkpoint's freeze plan was made for another pipeline: {len(theirs)} actions, "
            f"of which this run has {len(theirs & ours)}; resume with "
            f"{key('pipeline')} and batch sizes, or, to measure again, {key('begin_anew')}"
        )
