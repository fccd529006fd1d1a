import itertools
from dataclasses import replace

import highspy
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timelyfreeze.helpers.programs import random_program
from timelyfreeze.planning.interior.reduction import ReducedLp, lower_bound, reduce_lp
from timelyfreeze.planning.program import FreezeLp, build_lp
from timelyfreeze.planning.simplex import load
from timelyfreeze.schedule.dag import build_dag, makespan
from timelyfreeze.schedule.order import parse_order
from timelyfreeze.timing.bounds import DurationBounds

seeds = st.integers(0, 10**6)


def dense(reduced: ReducedLp) -> np.ndarray:
    matrix = np.zeros((len(reduced.least), len(reduced.free)))
    matrix[reduced.rows.row_of, reduced.rows.columns] = reduced.rows.values
    return matrix


def minimum(lp: FreezeLp, cost: np.ndarray) -> tuple[float, np.ndarray]:
    """Optimum and row overheads, by HiGHS on the program as it stands."""
    solver = load(lp, 60.0)
    solver.changeColsCost(len(cost), np.arange(len(cost), dtype=np.int32), cost)
    solver.run()
    assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    overheads = np.array(solver.getSolution().row_dual)
    return float(solver.getInfo().objective_function_value), overheads


def minimum_reduced(reduced: ReducedLp, cost: np.ndarray) -> float:
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    infinity = highspy.kHighsInf
    for c in cost[reduced.free].tolist():
        solver.addVar(-infinity, infinity)
        solver.changeColCost(solver.getNumCol() - 1, c)
    for row, least in zip(dense(reduced), reduced.least.tolist(), strict=True):
        indices = np.flatnonzero(row).astype(np.int32)
        solver.addRow(least, infinity, len(indices), indices, row[indices])
    solver.run()
    assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return float(solver.getInfo().objective_function_value + cost @ reduced.fixed)


def test_by_hand() -> None:
    # One backward of 2 that can shrink to 1. Columns: P of 0F0, P of 0B0, P_d, r.
    dag = build_dag(parse_order(["0F0 0B0"]))
    bounds = DurationBounds(np.array([2.0, 1.0]), np.array([2.0, 2.0]))
    half = reduce_lp(build_lp(dag, bounds, 0.5))
    assert half.free.tolist() == [0, 1, 2, 3]
    assert dense(half).tolist() == [
        [-1.0, 1.0, 0.0, 0.0],
        [0.0, -1.0, 1.0, 0.5],
        [0.0, 0.0, 0.0, -1.0],  # the budget, turned
        [1.0, 0.0, 0.0, 0.0],
        [0.0, 1.0, 0.0, 0.0],
        [0.0, 0.0, 1.0, 0.0],
        [0.0, 0.0, 0.0, 1.0],
        [0.0, 0.0, 0.0, -1.0],
    ]
    assert half.least.tolist() == [1.0, 1.0, -0.5, 0.0, 0.0, 0.0, 0.0, -1.0]
    assert half.row_overheads(np.arange(1.0, 9.0), 3).tolist() == [1.0, 2.0, -3.0]
    # With a cap of 1 the budget always holds; with 0 it fixes the ratio.
    assert reduce_lp(build_lp(dag, bounds, 1.0)).row.tolist() == [0, 1]
    none = reduce_lp(build_lp(dag, bounds, 0.0))
    assert (none.row.tolist(), none.free.tolist()) == ([0, 1], [0, 1, 2])
    # A ratio fixed at 1 moves to the right side: P_d - P >= 1 - 0.5.
    lp = build_lp(dag, bounds, 1.0)
    lower = np.array([0.0, 0.0, 0.0, 1.0])
    fixed = reduce_lp(replace(lp, column_lower=lower))
    assert fixed.fixed.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert fixed.least.tolist() == [1.0, 0.5, 0.0, 0.0, 0.0]


@given(seeds, st.floats(0.0, 1.0))
def test_has_the_same_optimum(seed: int, overhead: float) -> None:
    dag, bounds, caps = random_program(seed)
    lp = build_lp(dag, bounds, caps)
    cost = np.concatenate(
        [np.zeros(lp.n_actions), [1.0], np.full(len(lp.freezable), 0.1 * overhead)]
    )
    reduced = reduce_lp(lp)
    assert minimum_reduced(reduced, cost) == pytest.approx(minimum(lp, cost)[0], abs=1e-6)


@given(seeds, seeds)
def test_no_overheads_promise_more_than_the_optimum(seed: int, other: int) -> None:
    dag, bounds, caps = random_program(seed)
    lp = build_lp(dag, bounds, caps)
    cost = np.concatenate([np.zeros(lp.n_actions), [1.0], np.zeros(len(lp.freezable))])
    best, overheads = minimum(lp, cost)
    unfrozen = makespan(dag, bounds.max_ms) / lp.scale_ms
    rng = np.random.default_rng(other)
    for error in (0.0, 1e-3, 0.3, 10.0):
        off = overheads + error * rng.normal(size=len(overheads))
        assert lower_bound(lp, cost, off, unfrozen) <= best + 1e-9
    assert lower_bound(lp, cost, overheads, unfrozen) == pytest.approx(best, abs=1e-6)


def test_a_path_is_a_lower_bound() -> None:
    # Overhead 1 on the rows of a path, 0 elsewhere: the path's length with everything on it frozen
    # as far as bounds allow, here 2 + 1.
    dag = build_dag(parse_order(["0F0 0B0"]))
    lp = build_lp(dag, DurationBounds(np.array([2.0, 1.0]), np.array([2.0, 2.0])), 0.5)
    cost = np.array([0.0, 0.0, 1.0, 0.0])
    assert lower_bound(lp, cost, np.array([1.0, 1.0, 0.0]), 2.0) * lp.scale_ms == 3.0
    # With a overhead on the budget as well, it is the optimum: 2 + 1.5.
    assert lower_bound(lp, cost, np.array([1.0, 1.0, -0.5]), 2.0) * lp.scale_ms == 3.5


def test_bounds_and_overheads_of_both_signs() -> None:
    """Overheads with the wrong sign for their row count for nothing."""
    dag = build_dag(parse_order(["0F0 0B0"]))
    lp = build_lp(dag, DurationBounds(np.array([2.0, 1.0]), np.array([2.0, 2.0])), 0.5)
    cost = np.array([0.0, 0.0, 1.0, 0.0])
    for signs in itertools.product([-1.0, 1.0], repeat=3):
        assert lower_bound(lp, cost, np.array(signs), 2.0) * lp.scale_ms <= 3.5
