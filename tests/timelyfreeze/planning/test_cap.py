"""The cap that is chosen, against every cap tried by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from timelyfreeze.planning import FreezePlan, SolverChoices, solve_freeze_ratios
from timelyfreeze.planning import solution as solution_module
from timelyfreeze.planning.solution import chosen_plan
from timelyfreeze.schedule import build_dag, one_f_one_b_order
from timelyfreeze.settings import AUTO
from timelyfreeze.timing import uniform_bounds

DAG = build_dag(one_f_one_b_order(4, 8))
BOUNDS = uniform_bounds(DAG, forward_ms=1.0, backward_ms=(1.0, 2.0))


def times_of(caps: list[float]) -> dict[float, float]:
    """Estimated time to a loss under each cap, by the formula of ``progress``."""
    times = {}
    for cap in caps:
        plan = solve_freeze_ratios(DAG, BOUNDS, max_freeze_ratio=cap)
        mean = np.array(list(plan.stage_mean_ratios().values()))
        steps = np.sqrt(1.0 + (mean / (1.0 - np.minimum(mean, 0.99))).mean())
        times[cap] = plan.batch_ms / plan.unfrozen_batch_ms * steps
    return times


def test_the_cap_is_the_smallest_that_keeps_three_quarters_of_the_best_gain() -> None:
    chosen = chosen_plan(DAG, BOUNDS, SolverChoices(AUTO)).time_to_loss
    assert chosen is not None
    times = times_of(np.linspace(0.02, 0.98, 25).tolist())
    best = 1.0 - min(times.values())
    assert best > 0.03
    assert 1.0 - chosen >= 0.75 * best - 0.005
    tried = times_of([0.05, 0.1, 0.15, 0.2, 0.25, 0.3])
    (cap,) = [cap for cap, time in tried.items() if time == pytest.approx(chosen, abs=1e-9)]
    assert all(1.0 - time < 0.75 * best for smaller, time in tried.items() if smaller < cap)


def test_the_more_frozen_weights_keep_the_more_is_frozen() -> None:
    plans = [
        chosen_plan(DAG, replace(BOUNDS, captured=part, captured_mean=part), SolverChoices(AUTO))
        for part in (0.0, 0.4, 1.0)
    ]
    sums = [plan.ratios.sum() for plan in plans]
    assert sums[0] < sums[1] < sums[2]
    times = [plan.time_to_loss for plan in plans]
    assert times == sorted(times, reverse=True)
    shortest = solve_freeze_ratios(DAG, BOUNDS, max_freeze_ratio=1.0)
    assert 1.0 - times[2] >= 0.75 * shortest.gain / (1.0 + shortest.gain)


def test_the_papers_cap_costs_more_than_it_saves() -> None:
    default = chosen_plan(DAG, BOUNDS, SolverChoices(0.8))
    assert default.time_to_loss is not None
    assert default.time_to_loss > 1.0


def test_the_more_is_beside_batches_the_less_is_frozen() -> None:
    plans = [
        chosen_plan(DAG, replace(BOUNDS, outside_ms=outside_ms), SolverChoices(AUTO))
        for outside_ms in (0.0, 8.0, 300.0)
    ]
    sums = [plan.ratios.sum() for plan in plans]
    assert sums[0] >= sums[1] > sums[2]
    times = [plan.time_to_loss for plan in plans]
    assert times == sorted(times), "a batch takes 33 ms"
    assert times[2] > 1.0


def test_all_caps_together_have_the_time_of_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def noted(*args: Any, time_limit_s: float, **kwargs: Any) -> FreezePlan:
        limits.append(time_limit_s)
        return solve_freeze_ratios(*args, time_limit_s=time_limit_s, **kwargs)

    monkeypatch.setattr(solution_module, "solve_freeze_ratios", noted)
    for most_actions, n_caps in ((1024, 13), (10, 4)):
        limits.clear()
        monkeypatch.setattr(solution_module, "MAX_ACTIONS_BY_SIMPLEX", most_actions)
        chosen_plan(DAG, BOUNDS, SolverChoices(AUTO, time_limit_s=26.0))
        assert len(limits) == n_caps
        assert sum(limits) == pytest.approx(26.0)
