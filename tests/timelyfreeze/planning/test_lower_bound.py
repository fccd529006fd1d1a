import itertools

import highspy
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timelyfreeze.helpers.programs import random_program
from timelyfreeze.planning.interior_point import improved_lower_bound, lower_bound
from timelyfreeze.planning.program import FreezeLp, PrecedenceRows, build_lp
from timelyfreeze.planning.simplex import load
from timelyfreeze.schedule.dag import build_dag, makespan
from timelyfreeze.schedule.order import parse_order
from timelyfreeze.timing.bounds import DurationBounds

seeds = st.integers(0, 10**6)


def minimum(lp: FreezeLp, cost: np.ndarray) -> tuple[float, np.ndarray]:
    """Optimum and row duals, by HiGHS on the program as it stands."""
    solver = load(lp, 60.0)
    solver.changeColsCost(len(cost), np.arange(len(cost), dtype=np.int32), cost)
    solver.run()
    assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    duals = np.array(solver.getSolution().row_dual)
    return float(solver.getInfo().objective_function_value), duals


@given(seeds, seeds)
def test_no_duals_promise_more_than_the_optimum(seed: int, other: int) -> None:
    dag, bounds, caps = random_program(seed)
    lp = build_lp(dag, bounds, caps)
    cost = np.concatenate([np.zeros(lp.n_actions), [1.0], np.zeros(len(lp.freezable))])
    best, duals = minimum(lp, cost)
    unfrozen = makespan(dag, bounds.max_ms) / lp.scale_ms
    rng = np.random.default_rng(other)
    for error in (0.0, 1e-3, 0.3, 10.0):
        off = duals + error * rng.normal(size=len(duals))
        assert lower_bound(lp, off, unfrozen) <= best + 1e-9
        assert improved_lower_bound(lp, PrecedenceRows(lp), off, unfrozen) <= best + 1e-9
    assert lower_bound(lp, duals, unfrozen) == pytest.approx(best, abs=1e-6)


def test_a_path_is_a_lower_bound() -> None:
    # Dual value 1 for the rows of a path, 0 elsewhere: the path's length with everything on it
    # frozen as far as bounds allow, here 2 + 1.
    dag = build_dag(parse_order(["0F0 0B0"]))
    lp = build_lp(dag, DurationBounds(np.array([2.0, 1.0]), np.array([2.0, 2.0])), 0.5)
    assert lower_bound(lp, np.array([1.0, 1.0, 0.0]), 2.0) * lp.scale_ms == 3.0
    # With a dual value for the budget as well, it is the optimum: 2 + 1.5.
    assert lower_bound(lp, np.array([1.0, 1.0, -0.5]), 2.0) * lp.scale_ms == 3.5


def test_bounds_and_duals_of_both_signs() -> None:
    """Dual values with the wrong sign for their row count for nothing."""
    dag = build_dag(parse_order(["0F0 0B0"]))
    lp = build_lp(dag, DurationBounds(np.array([2.0, 1.0]), np.array([2.0, 2.0])), 0.5)
    for signs in itertools.product([-1.0, 1.0], repeat=3):
        bound = lower_bound(lp, np.array(signs), 2.0)
        assert bound * lp.scale_ms <= 3.5
        first, second, budget = signs
        counted = np.array([max(first, 0.0), max(second, 0.0), min(budget, 0.0)])
        assert bound == lower_bound(lp, counted, 2.0)
