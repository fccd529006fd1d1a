"""Eq. 8 as printed, over all action nodes V_s of a stage, against our cap on what can be frozen.

A stage has M forwards, which have r = 0. With full backwards |V_s| is 2 M, and the sum of ratios
may be 2 M r_max; with split ones it is 3 M. Ours is cap times the number of B and W, so both sums
have one limit where the cap is r_max |V_s| over that number, at most 1, as a ratio is at most 1.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timelyfreeze.helpers.pipelines import random_bounds, random_order
from tests.timelyfreeze.helpers.programs import noisy_bounds, scheduled
from timelyfreeze.planning.lp import solve_freeze_ratios
from timelyfreeze.schedule.dag import PipelineDag, build_dag
from timelyfreeze.timing.bounds import DurationBounds

R_MAX = [0.1, 0.25, 1 / 3, 0.4, 0.5, 0.8]


def solve_as_printed(dag: PipelineDag, bounds: DurationBounds, r_max: float) -> tuple[float, float]:
    """Least P_d, then the least sum of ratios at it. Columns P of each action, P_d, w of each."""
    linprog = pytest.importorskip("scipy.optimize").linprog
    n = len(dag.actions)
    span = bounds.max_ms - bounds.min_ms
    delta = np.divide(1.0, span, out=np.zeros(n), where=span > 0.0)
    rows, limits = [], []
    for i, j in [*dag.edges.tolist(), *((i, n) for i in range(n))]:
        row = np.zeros(2 * n + 1)
        row[i], row[j], row[n + 1 + i] = 1.0, -1.0, 1.0
        rows.append(row)
        limits.append(0.0)
    for stage in range(dag.n_stages):
        of_stage = dag.stages == stage
        rows.append(np.concatenate([np.zeros(n + 1), np.where(of_stage, -delta, 0.0)]))
        limits.append(r_max * of_stage.sum() - (delta * bounds.max_ms)[of_stage].sum())

    def least(cost: np.ndarray, most_ms: float | None) -> float:
        boxes = [(0.0, None)] * n + [(0.0, most_ms)]
        boxes += list(zip(bounds.min_ms, bounds.max_ms, strict=True))
        found = linprog(cost, A_ub=np.array(rows), b_ub=limits, bounds=boxes, method="highs-ds")
        assert found.status == 0, found.message
        return float(found.fun)

    batch_ms = least(np.eye(2 * n + 1)[n], None)
    live = least(np.concatenate([np.zeros(n + 1), -delta]), batch_ms * (1.0 + 1e-9))
    return batch_ms, live + float((delta * bounds.max_ms).sum())


def nodes_per_freezable(dag: PipelineDag) -> np.ndarray:
    """How many nodes each stage has for each B and W of it."""
    letters = np.array([str(action.kind.value) for action in dag.actions])
    return np.bincount(dag.stages) / np.bincount(dag.stages[np.isin(letters, ["B", "W"])])


@given(seed=st.integers(0, 10**6), r_max=st.sampled_from(R_MAX))
def test_a_cap_that_counts_all_nodes_is_a_larger_one(seed: int, r_max: float) -> None:
    """For full, split and mixed backwards, with savings of none, some and all of an action."""
    dag = build_dag(random_order(seed))
    bounds = random_bounds(dag, seed)
    caps = np.minimum(1.0, r_max * nodes_per_freezable(dag))
    plan = solve_freeze_ratios(dag, bounds, max_freeze_ratio=caps.tolist())
    batch_ms, ratio_sum = solve_as_printed(dag, bounds, r_max)
    assert plan.batch_ms == pytest.approx(batch_ms, rel=1e-6)
    assert plan.ratios.sum() == pytest.approx(ratio_sum, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("schedule", "times"),
    [
        ("GPipe", 2.0), ("1F1B", 2.0), ("Interleaved1F1B", 2.0), ("InterleavedZeroBubble", 3.0),
        ("ZBVZeroBubble", 3.0),
    ],
)  # fmt: skip
def test_it_is_two_or_three_times_as_large(schedule: str, times: float) -> None:
    dag = scheduled(schedule, 2, 4)
    bounds = noisy_bounds(dag, 0)
    assert nodes_per_freezable(dag).tolist() == [times] * dag.n_stages
    for r_max in (0.15, 0.3):
        batch_ms, _ = solve_as_printed(dag, bounds, r_max)
        scaled = solve_freeze_ratios(dag, bounds, max_freeze_ratio=times * r_max)
        assert scaled.batch_ms == pytest.approx(batch_ms, rel=1e-6)
        # The same number, taken as our cap, allows less.
        assert solve_freeze_ratios(dag, bounds, max_freeze_ratio=r_max).batch_ms > 1.01 * batch_ms
    # From 1/2 and 1/3 on, the paper's 0.8 among them, all nodes counted are no limit.
    assert solve_as_printed(dag, bounds, 0.8)[0] == pytest.approx(scaled.frozen_batch_ms, rel=1e-6)


def test_where_some_backwards_are_split_it_differs_from_stage_to_stage() -> None:
    times = nodes_per_freezable(scheduled("DualPipeV", 4, 8))
    assert ((times > 2.0) & (times < 3.0)).all()
    assert len(set(times.tolist())) > 1
