"""The cap that is chosen, against every cap tried by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from timelyfreeze.planning import (
    MEASURED_RATIOS,
    FreezePlan,
    SolverChoices,
    plan_from_ratios,
    solve_freeze_ratios,
)
from timelyfreeze.planning import cap as cap_module
from timelyfreeze.planning.cap import chosen_plan
from timelyfreeze.schedule import build_dag, one_f_one_b_order
from timelyfreeze.settings import AUTO
from timelyfreeze.timing import uniform_bounds

DAG = build_dag(one_f_one_b_order(4, 8))
TENSORS = uniform_bounds(DAG, forward_ms=1.0, backward_ms=(1.0, 2.0))
TOKENS = replace(uniform_bounds(DAG, forward_ms=1.0, backward_ms=(1.5, 2.0)), measured_ratio=0.5)
SAMPLED = SolverChoices(AUTO, samples_tokens=True, measured_ratio=0.5)


def curves(scale: float) -> dict[int, tuple[float, ...]]:
    return {stage: tuple(scale * r**3 for r in MEASURED_RATIOS) for stage in range(4)}


def times_of(caps: list[float]) -> dict[float, float]:
    """Estimated time to a loss under each cap of tensors, by the formula of ``progress``."""
    times = {}
    for cap in caps:
        plan = solve_freeze_ratios(DAG, TENSORS, max_freeze_ratio=cap)
        mean = np.array(list(plan.stage_mean_ratios().values()))
        steps = np.sqrt(1.0 + (mean / (1.0 - np.minimum(mean, 0.99))).mean())
        times[cap] = plan.batch_ms / plan.unfrozen_batch_ms * steps
    return times


def test_the_cap_of_tensors_is_the_smallest_that_keeps_three_quarters_of_the_best_gain() -> None:
    chosen = chosen_plan(DAG, TENSORS, SolverChoices(AUTO), {}).time_to_loss
    assert chosen is not None
    times = times_of(np.linspace(0.02, 0.98, 25).tolist())
    best = 1.0 - min(times.values())
    assert best > 0.03
    assert 1.0 - chosen >= 0.75 * best - 0.005
    tried = times_of([0.05, 0.1, 0.15, 0.2, 0.25, 0.3])
    (cap,) = [cap for cap, time in tried.items() if time == pytest.approx(chosen, abs=1e-9)]
    assert all(1.0 - time < 0.75 * best for smaller, time in tried.items() if smaller < cap)


def test_the_papers_cap_costs_more_than_it_saves() -> None:
    default = chosen_plan(DAG, TENSORS, SolverChoices(0.8), {})
    assert default.time_to_loss is not None
    assert default.time_to_loss > 1.0


def test_the_more_is_beside_batches_the_less_is_frozen() -> None:
    plans = [
        chosen_plan(DAG, replace(TENSORS, outside_ms=outside_ms), SolverChoices(AUTO), {})
        for outside_ms in (0.0, 8.0, 300.0)
    ]
    sums = [plan.ratios.sum() for plan in plans]
    assert sums[0] >= sums[1] > sums[2]
    times = [plan.time_to_loss for plan in plans]
    assert times == sorted(times), "a batch takes 33 ms"
    assert times[2] > 1.0


@pytest.mark.parametrize(
    ("scale", "low", "high"), [(0.0, 0.5, 0.5), (1.0, 0.3, 0.5), (50.0, 0.0, 0.2)]
)
def test_the_noisier_samples_are_the_fewer_tokens_are_left_out(
    scale: float, low: float, high: float
) -> None:
    plan = chosen_plan(DAG, TOKENS, SAMPLED, curves(scale))
    assert low <= plan.ratios.max() <= high


def test_a_cap_for_each_action_holds_for_each_and_spreads_ratios() -> None:
    plan = chosen_plan(DAG, TOKENS, replace(SAMPLED, max_freeze_ratio=0.3), curves(1.0))
    assert plan.ratios.max() == pytest.approx(0.3)
    whole = replace(TOKENS, min_ms=2 * TOKENS.min_ms - TOKENS.max_ms, measured_ratio=1.0)
    paper = solve_freeze_ratios(DAG, whole, max_freeze_ratio=0.3)
    assert paper.ratios.max() > 0.9


def test_of_plans_as_short_the_one_with_least_variance_is_taken() -> None:
    choices = replace(SAMPLED, max_freeze_ratio=0.5)
    # A loose bound on the batch: the last microbatches of the first stage decide, others wait.
    low = TOKENS.max_ms.copy()
    low[DAG.stages == 0] = TOKENS.min_ms[DAG.stages == 0]
    bounds = replace(TOKENS, min_ms=low)
    plan = chosen_plan(DAG, bounds, choices, curves(1.0))
    shortest = solve_freeze_ratios(DAG, bounds, max_freeze_ratio=0.5, caps_each=True)
    assert plan.batch_ms == pytest.approx(shortest.batch_ms)
    rng = np.random.default_rng(0)
    odds = (plan.ratios / (1.0 - plan.ratios)).sum()
    base = plan.ratios[DAG.freezable]
    for _ in range(300):
        other = plan.ratios.copy()
        moved = base + 0.05 * rng.standard_normal(len(base))
        other[DAG.freezable] = np.clip(np.where(base > 0.0, moved, 0.0), 0.0, 0.5)
        tried = plan_from_ratios(DAG, bounds, other)
        if tried.batch_ms <= plan.batch_ms + 1e-9:
            assert (other / (1.0 - other)).sum() >= odds - 1e-3


def test_what_was_not_measured_is_not_guessed() -> None:
    with pytest.raises(ValueError, match=r"not measured in every stage.*set warmup to 1 or more"):
        chosen_plan(DAG, TOKENS, SAMPLED, {})
    known = replace(SAMPLED, max_freeze_ratio=0.3)
    assert chosen_plan(DAG, TOKENS, known, {}).time_to_loss is None
    inputs = replace(known, input_fraction=0.5)
    assert chosen_plan(DAG, TOKENS, inputs, curves(1.0)).time_to_loss is None


def test_all_caps_together_have_the_time_of_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def noted(*args: Any, time_limit_s: float, **kwargs: Any) -> FreezePlan:
        limits.append(time_limit_s)
        return solve_freeze_ratios(*args, time_limit_s=time_limit_s, **kwargs)

    monkeypatch.setattr(cap_module, "solve_freeze_ratios", noted)
    for most_actions, n_caps in ((1024, 13), (10, 4)):
        limits.clear()
        monkeypatch.setattr(cap_module, "MAX_ACTIONS_BY_SIMPLEX", most_actions)
        chosen_plan(DAG, TENSORS, SolverChoices(AUTO, time_limit_s=26.0), {})
        assert len(limits) == n_caps
        assert sum(limits) == pytest.approx(26.0)
