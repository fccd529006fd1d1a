"""Plans that look for input gradients to skip, against every choice there is."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.timelyfreeze.helpers.programs import noisy_bounds, scheduled
from timelyfreeze.planning.lp import solve_freeze_ratios
from timelyfreeze.planning.plan import FreezePlan
from timelyfreeze.planning.skipped_grads import skip_depths, skipped_actions
from timelyfreeze.schedule.dag import PipelineDag, build_dag, start_times
from timelyfreeze.schedule.order import ScheduleOrder, parse_order
from timelyfreeze.schedule.schedules import gpipe_order, one_f_one_b_order
from timelyfreeze.timing.bounds import DurationBounds, uniform_bounds
from timelyfreeze.timing.p2p_costs import with_messages

SPLIT = parse_order(["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"])


def solve(
    dag: PipelineDag, bounds: DurationBounds, cap: float, skip_input_grads: str, **more: float
) -> FreezePlan:
    return solve_freeze_ratios(
        dag,
        bounds,
        max_freeze_ratio=cap,
        whole_stages=(0,),
        skip_input_grads=skip_input_grads,
        **more,
    )


def best_of_all_depths(dag: PipelineDag, bounds: DurationBounds, cap: float) -> float:
    """Try every depth for every microbatch; the rest by the ordinary program with bounds by hand.

    Fixing a ratio at 1 is done in the bounds: the action takes its frozen time in any case, and the
    caps are what is left.
    """
    microbatches = sorted({a.microbatch for a in dag.actions})
    best = np.inf
    for chosen in itertools.product(range(dag.n_stages + 1), repeat=len(microbatches)):
        depth = dict(zip(microbatches, chosen, strict=True))
        low, high = bounds.min_ms.copy(), bounds.max_ms.copy()
        used = np.zeros(dag.n_stages)
        for i, a in enumerate(dag.actions):
            if a.kind.value == "F":
                continue
            is_skipped = a.stage < depth[a.microbatch]
            if is_skipped and a.stage > 0:
                low[i] = high[i] = 0.0
            elif is_skipped:
                high[i] = low[i]
            elif a.stage == 0:
                low[i] = high[i]
            used[a.stage] += is_skipped and a.kind.freezable
        left = cap * len(microbatches) - used
        if (left < -1e-9).any():
            continue
        # Pinned actions count in a mean ratio, with 0.
        caps = np.clip(left / len(microbatches), 0.0, 1.0)
        plan = solve_freeze_ratios(dag, DurationBounds(low, high), max_freeze_ratio=caps.tolist())
        best = min(best, plan.batch_ms)
    return float(best)


@pytest.mark.parametrize("cap", [0.3, 0.5, 0.75, 1.0])
@pytest.mark.parametrize(
    "order", [gpipe_order(2, 3), one_f_one_b_order(2, 4), one_f_one_b_order(3, 3), SPLIT]
)
def test_no_choice_of_depths_is_better(order: ScheduleOrder, cap: float) -> None:
    dag = build_dag(order)
    bounds = noisy_bounds(dag, 7)
    plan = solve(dag, bounds, cap, "plan")
    best_ms = best_of_all_depths(dag, bounds, cap)
    assert plan.batch_ms == pytest.approx(best_ms, rel=2e-3)


def test_by_hand() -> None:
    """One microbatch of two may be frozen: the first, which then costs rank 1 nothing."""
    dag = build_dag(gpipe_order(2, 2))
    bounds = uniform_bounds(dag, forward_ms=1.0, backward_ms=(2.0, 3.0))
    # Rank 1: F0 F1 to 3, B1 to 6. Rank 0: B0, frozen, from 3 to 5, B1 from 6 to 9.
    plan = solve(dag, bounds, 0.5, "plan")
    assert plan.batch_ms == 9.0
    assert skip_depths(dag, plan.ratios) == {0: 2}
    # With its input gradient: B0 to 5, B1 to 8; B0 from 5 to 8, B1, frozen, to 10.
    assert solve(dag, bounds, 0.5, "off").batch_ms == 10.0


@pytest.mark.parametrize("cap", [0.0, 0.4, 0.8])
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_a_plan_keeps_its_budgets_and_its_word(name: str, cap: float) -> None:
    dag = scheduled(name, 2, 6)
    bounds = noisy_bounds(dag, 3)
    plans = {
        skip_input_grads: solve(dag, bounds, cap, skip_input_grads)
        for skip_input_grads in ("off", "use", "plan")
    }
    assert plans["plan"].batch_ms <= plans["use"].batch_ms <= plans["off"].batch_ms
    for skip_input_grads, plan in plans.items():
        assert max(plan.stage_mean_ratios().values()) <= cap + 1e-9
        first = plan.ratios[dag.freezable & (dag.stages == 0)]
        assert set(first.tolist()) <= {0.0, 1.0}
        durations = (1.0 - plan.ratios) * bounds.max_ms + plan.ratios * bounds.min_ms
        if skip_input_grads != "off":
            durations[skipped_actions(dag, skip_depths(dag, plan.ratios))] = 0.0
        assert plan.batch_ms == pytest.approx(
            float(np.max(start_times(dag, durations) + durations))
        )
    # Those of "use" are the ratios of "off": there it only counts what is left out anyway.
    assert np.array_equal(plans["use"].ratios, plans["off"].ratios)


def test_no_last_skipped_stage_is_frozen_in_vain() -> None:
    dag = scheduled("1F1B", 4, 4)
    bounds = noisy_bounds(dag, 5)
    plan = solve(dag, bounds, 0.75, "plan")
    depths = skip_depths(dag, plan.ratios)
    assert max(depths.values()) > 1
    for microbatch, depth in depths.items():
        if depth == 1:
            continue
        (i,) = (
            k
            for k, a in enumerate(dag.actions)
            if a.kind.freezable and (a.stage, a.microbatch) == (depth - 1, microbatch)
        )
        ratios = np.where(np.arange(len(dag.actions)) == i, 0.0, plan.ratios)
        durations = (1.0 - ratios) * bounds.max_ms + ratios * bounds.min_ms
        durations[skipped_actions(dag, skip_depths(dag, ratios))] = 0.0
        assert np.max(start_times(dag, durations) + durations) > plan.batch_ms


def test_messages_are_still_waited_for() -> None:
    dag = build_dag(one_f_one_b_order(2, 4))
    bounds = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
    plan = solve(dag, with_messages(dag, bounds, 0.5), 0.5, "plan")
    idle = skipped_actions(dag, skip_depths(dag, plan.ratios))
    assert idle.any()
    # The last stage receives no gradients.
    assert set(plan.durations_ms[idle].tolist()) == {0.0}
    dag = build_dag(one_f_one_b_order(3, 4))
    bounds = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
    plan = solve(dag, with_messages(dag, bounds, 0.5), 0.5, "plan")
    idle = skipped_actions(dag, skip_depths(dag, plan.ratios)) & (dag.stages == 1)
    assert set(plan.durations_ms[idle].tolist()) == {0.5}


@given(seed=st.integers(0, 10**6))
@settings(max_examples=10)
def test_ranks_that_fraction_a_processor_gain_by_all_that_is_left_out(seed: int) -> None:
    """On one processor a batch takes as long as all work, so the oracle is a sum."""
    dag = build_dag(one_f_one_b_order(2, 4))
    bounds = noisy_bounds(dag, seed, 0.1)
    plan = solve(dag, bounds, 0.5, "plan", n_processors=1.0)
    assert plan.batch_ms == pytest.approx(float(plan.durations_ms.sum()))
    saves = {}
    for microbatch in range(4):
        own = [
            i for i, a in enumerate(dag.actions) if a.kind.freezable and a.microbatch == microbatch
        ]
        first, second = sorted(own, key=lambda i: dag.stages[i])
        saves[microbatch] = bounds.max_ms[second] + bounds.max_ms[first] - bounds.min_ms[first]
    # Two whole microbatches fit into the budget; no other use of it saves more.
    both = sum(sorted(saves.values())[-2:])
    assert plan.batch_ms <= float(bounds.max_ms.sum()) - both + 2e-3 * plan.batch_ms


def test_a_pinned_backward_ends_every_skip() -> None:
    dag = build_dag(one_f_one_b_order(3, 3))
    bounds = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
    low = np.where((dag.stages == 1) & dag.freezable, bounds.max_ms, bounds.min_ms)
    plan = solve(dag, DurationBounds(low, bounds.max_ms), 1.0, "plan")
    assert set(skip_depths(dag, plan.ratios).values()) <= {1}
    assert not plan.ratios[dag.stages == 1].any()
