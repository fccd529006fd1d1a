"""From measured times to a plan: the whole method, on plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from timelyfreeze.planning.cap import SolverChoices, chosen_plan
from timelyfreeze.planning.plan import FreezePlan, plan_from_json, plan_to_json
from timelyfreeze.planning.rank_times import RankTimes, bounds_from_times
from timelyfreeze.schedule import (
    PipelineDag,
    ScheduleOrder,
    build_dag,
    order_from_csv,
    order_to_csv,
)
from timelyfreeze.settings import key
from timelyfreeze.timing import DurationBounds, bounds_from_json, bounds_to_json


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

    Args:
        ranks: Times of every process; data-parallel replicas may repeat actions.
        declared: What the schedule says it runs. If something else ran, that counts.
        choices: What the plan is solved under.

    Raises:
        ValueError: If times are missing or make no sense.
        LpError: If the solver ends without an optimum.
    """
    order, bounds = bounds_from_times(ranks, declared, choices.n_processors)
    outside_ms = min((float(np.median(r.outside_ms)) for r in ranks if r.outside_ms), default=0.0)
    inside, whole = np.sum([each.energies for each in ranks], axis=0).tolist()
    captured = inside / whole if whole > 0.0 else 0.0
    bounds = replace(bounds, outside_ms=outside_ms, captured=captured)
    return solve_from_bounds(order, bounds, choices)


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
    """Return what ``solution_to_plain`` was given.

    Raises:
        ValueError: If a text has another form.
    """
    order = order_from_csv(plain["order"])
    dag = build_dag(order)
    bounds = bounds_from_json(dag, plain["bounds"])
    return Solution(order, dag, bounds, plan_from_json(plain["plan"]))


def check_same_pipeline(planned: ScheduleOrder, declared: ScheduleOrder) -> None:
    """Refuse a saved plan that was made for another pipeline; another order of its actions will do.

    Raises:
        ValueError: If their actions differ.
    """
    theirs = {action for rank in planned.ranks for action in rank}
    ours = {action for rank in declared.ranks for action in rank}
    if theirs != ours:
        raise ValueError(
            f"the checkpoint's freeze plan was made for another pipeline: {len(theirs)} actions, "
            f"of which this run has {len(theirs & ours)}; resume with "
            f"{key('pipeline')} and batch sizes, or, to measure anew, {key('begin_anew')}"
        )
