import highspy
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyfreeze.planning.interior.mehrotra import solve_interior
from timelyfreeze.planning.interior.newton import NewtonMatrix
from timelyfreeze.planning.interior.rows import Rows
from timelyfreeze.planning.interior.strip import StripError


def rows_of(matrix: np.ndarray) -> Rows:
    row, column = np.nonzero(matrix)
    start = np.searchsorted(row, np.arange(len(matrix) + 1))
    return Rows(start, column, matrix[row, column], matrix.shape[1])


def minimum(matrix: np.ndarray, least: np.ndarray, cost: np.ndarray) -> float:
    """The least c'x over G x >= h, by HiGHS."""
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    infinity = highspy.kHighsInf
    for c in cost.tolist():
        solver.addVar(-infinity, infinity)
        solver.changeColCost(solver.getNumCol() - 1, c)
    for row, low in zip(matrix, least.tolist(), strict=True):
        indices = np.flatnonzero(row).astype(np.int32)
        solver.addRow(low, infinity, len(indices), indices, row[indices])
    solver.run()
    assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return float(solver.getInfo().objective_function_value)


def test_a_corner_by_hand() -> None:
    # Least x + y with x >= 0, y >= 0, 2x + y >= 4, x + 3y >= 6: at x = 6/5, y = 8/5.
    matrix = np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0], [1.0, 3.0]])
    least, cost = np.array([0.0, 0.0, 4.0, 6.0]), np.array([1.0, 1.0])
    found = solve_interior(
        rows_of(matrix),
        least,
        cost,
        start=np.array([5.0, 5.0]),
        eliminate=np.array([False, False]),
        tolerance=1e-10,
    )
    assert found.x == pytest.approx([1.2, 1.6], rel=1e-8)
    # 2u + v = 1 and u + 3v = 1.
    assert found.overheads == pytest.approx([0.0, 0.0, 0.4, 0.2], abs=1e-8)
    assert max(found.gap, found.residual) <= 1e-10


@given(st.integers(0, 10**6), st.integers(1, 25), st.integers(0, 40))
def test_agrees_with_highs_on_random_programs(seed: int, n: int, n_rows: int) -> None:
    rng = np.random.default_rng(seed)
    general = rng.normal(size=(n_rows, n)) * (rng.random((n_rows, n)) < 0.4)
    general = general[np.abs(general).sum(axis=1) > 0.0]
    matrix = np.concatenate([general, np.eye(n), -np.eye(n)])
    start = rng.uniform(-1.0, 1.0, n)
    # Rows as far below the start as it takes, and often the same: corners with many rows.
    least = matrix @ start - rng.choice([0.1, 0.5, 2.0], len(matrix))
    cost = rng.choice([-1.0, 0.0, 0.5, 2.0], n)
    found = solve_interior(
        rows_of(matrix), least, cost, start=start, eliminate=rng.random(n) < 0.5, tolerance=1e-8
    )
    best = minimum(matrix, least, cost)
    scale = max(abs(best), 1.0)
    assert (matrix @ found.x >= least - 1e-8).all()
    assert float(cost @ found.x) == pytest.approx(best, abs=1e-6 * scale)
    assert (found.overheads > 0.0).all()
    assert float(least @ found.overheads) <= best + 1e-6 * scale


def test_stops_at_the_deadline_and_says_how_far_it_got() -> None:
    matrix = np.concatenate([np.eye(3), -np.eye(3)])
    found = solve_interior(
        rows_of(matrix),
        np.full(6, -1.0),
        np.array([1.0, 2.0, 3.0]),
        start=np.zeros(3),
        eliminate=np.zeros(3, dtype=bool),
        deadline=0.0,
    )
    assert found.n_steps == 0
    assert found.gap > 1e-3


def test_refuses_a_start_on_the_edge() -> None:
    with pytest.raises(ValueError, match=r"the start breaks a row by -?0\.0, or only just keeps"):
        solve_interior(
            rows_of(np.eye(2)),
            np.zeros(2),
            np.ones(2),
            start=np.array([1.0, 0.0]),
            eliminate=np.zeros(2, dtype=bool),
        )


def test_keeps_the_best_point_where_the_numbers_give_out(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = np.concatenate([np.eye(3), -np.eye(3)])
    factor = NewtonMatrix.factor
    calls = []

    def fails_at_the_fourth(self: NewtonMatrix, weights: np.ndarray) -> None:
        calls.append(weights)
        if len(calls) == 4:
            raise StripError("indefinite")
        factor(self, weights)

    monkeypatch.setattr(NewtonMatrix, "factor", fails_at_the_fourth)
    found = solve_interior(
        rows_of(matrix),
        np.full(6, -1.0),
        np.array([1.0, 2.0, 3.0]),
        start=np.zeros(3),
        eliminate=np.zeros(3, dtype=bool),
        tolerance=1e-12,
    )
    # One factorisation for the first overheads, two steps.
    assert found.n_steps == 2
    assert 1e-12 < found.gap < 0.5
