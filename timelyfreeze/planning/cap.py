"""Plans under a cap, and the cap under which a loss is estimated to be reached soonest."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.planning.lp import MAX_ACTIONS_BY_SIMPLEX, solve_freeze_ratios
from timelyfreeze.planning.plan import FreezePlan
from timelyfreeze.schedule import PipelineDag
from timelyfreeze.settings import AUTO
from timelyfreeze.timing import DurationBounds

# Caps that are tried; a pipeline that takes long to solve has time for few.
_CAPS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8)
_FEW_CAPS = (0.1, 0.2, 0.35, 0.5)
# The estimate is flat around its best: times scatter by more than what caps differ, and what frozen
# tensors cost is a formula, not measured. So the smallest cap is taken that gives up no more of the
# best one's gain than this, times the part of gradients that is lost.
_GIVEN_UP = 0.25


@dataclass(frozen=True)
class SolverChoices:
    """What a plan is solved under; most as for ``solve_freeze_ratios``."""

    # cap r_max, one number or one per stage; or ``settings.AUTO``
    max_freeze_ratio: float | tuple[float, ...] | str
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
        return _plan(dag, bounds, choices, choices.max_freeze_ratio)
    caps = _CAPS if len(dag.actions) <= MAX_ACTIONS_BY_SIMPLEX else _FEW_CAPS
    if bounds.captured > 0.0:  # nothing is frozen to no purpose, so all of it may be
        caps = (*caps, 1.0)
    # The limit is one on all of them: whoever waits for the plan waits no longer.
    each = replace(choices, time_limit_s=choices.time_limit_s / len(caps))
    plans = [_plan(dag, bounds, each, cap) for cap in caps]
    gains = [1.0 - (plan.time_to_loss or 0.0) for plan in plans]
    best = max(gains)
    kept = 1.0 - _GIVEN_UP * (1.0 - bounds.captured)
    enough = kept * best if best > 0.0 else best
    return next(plan for plan, gain in zip(plans, gains, strict=True) if gain >= enough)


def _plan(
    dag: PipelineDag,
    bounds: DurationBounds,
    choices: SolverChoices,
    cap: float | tuple[float, ...] | str,
) -> FreezePlan:
    plan = solve_freeze_ratios(
        dag,
        bounds,
        max_freeze_ratio=cap,  # type: ignore[arg-type]
        whole_stages=choices.whole_stages,
        n_processors=choices.n_processors,
        time_limit_s=choices.time_limit_s,
        skips_grads=choices.skips_grads,
    )
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
    means = [
        float(ratios[(dag.stages == stage) & dag.freezable].mean()) for stage in range(dag.n_stages)
    ]
    energy, mean = (
        1.0 - np.minimum((1.0 - part) * np.array(means), _MAX_RATIO)
        for part in (captured, captured_mean)
    )
    return math.sqrt(1.0 + float(np.maximum(energy / mean**2 - 1.0, 0.0).mean()))
