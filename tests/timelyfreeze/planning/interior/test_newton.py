import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyfreeze.planning.interior.newton import NewtonMatrix
from timelyfreeze.planning.interior.rows import Rows


def random_rows(rng: np.random.Generator, n: int, n_dense: int) -> Rows:
    """Bounds of all columns, rows over two to four neighbours, and rows over half of everything."""
    supports = [np.array([column]) for column in range(n)]
    for _ in range(2 * n):
        near = rng.integers(n) + rng.integers(0, 6, rng.integers(1, 4))
        supports.append(np.unique(np.minimum(near, n - 1)))
    supports += [np.flatnonzero(rng.random(n) < 0.5) for _ in range(n_dense)]
    supports = [support for support in supports if len(support)]
    rng.shuffle(supports)
    return Rows(
        np.cumsum([0, *map(len, supports)]),
        np.concatenate(supports),
        rng.choice([-1.0, 1.0, 0.3], sum(map(len, supports))),
        n,
    )


def dense(rows: Rows) -> np.ndarray:
    matrix = np.zeros((len(rows.start) - 1, rows.n_columns))
    matrix[rows.row_of, rows.columns] = rows.values
    return matrix


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_products_are_those_of_the_dense_matrix(seed: int, other: int) -> None:
    rows = random_rows(np.random.default_rng(seed), 30, 2)
    matrix, rng = dense(rows), np.random.default_rng(other)
    x, y = rng.normal(size=30), rng.normal(size=len(matrix))
    assert rows.times(x) == pytest.approx(matrix @ x, abs=1e-12)
    assert rows.transposed_times(y) == pytest.approx(matrix.T @ y, abs=1e-12)
    keep = rng.random(len(matrix)) < 0.5
    assert dense(rows.select(keep)).tolist() == matrix[keep].tolist()


@given(st.integers(0, 10**6), st.integers(2, 120), st.integers(0, 4), st.floats(0.0, 4.0))
def test_solves_as_a_dense_matrix_does(seed: int, n: int, n_dense: int, decades: float) -> None:
    rng = np.random.default_rng(seed)
    rows = random_rows(rng, n, n_dense)
    # Any choice is allowed: those that fraction a row with another are kept after all.
    newton = NewtonMatrix(rows, rng.random(n) < rng.choice([0.0, 0.3, 1.0]))
    for _ in range(2):
        weights = 10.0 ** rng.uniform(-decades, decades, len(rows.start) - 1)
        newton.factor(weights)
        right = rng.normal(size=n)
        x = newton.solve(right)
        matrix = dense(rows)
        assert matrix.T @ (weights * (matrix @ x)) == pytest.approx(right, abs=1e-6)


def test_refinement_reaches_the_accuracy_asked_for() -> None:
    rng = np.random.default_rng(1)
    rows = random_rows(rng, 300, 3)
    newton = NewtonMatrix(rows, np.zeros(300, dtype=bool))
    weights = 10.0 ** rng.uniform(-3.0, 3.0, len(rows.start) - 1)
    newton.factor(weights)
    matrix = dense(rows)
    right = matrix.T @ rng.uniform(0.0, 1.0, len(matrix))

    def missing(accuracy: float) -> float:
        x = newton.solve(right, accuracy)
        errors = matrix.T @ (weights * (matrix @ x)) - right
        return float(np.abs(errors).max() / np.abs(right).max())

    assert missing(1.0) > 2e-11  # what rounding leaves, before refinement
    assert missing(1e-11) <= 1e-11


def test_long_chains_beside_each_other_are_mostly_eliminated() -> None:
    # Four chains of 100 columns with a link between neighbouring chains at every tenth column.
    chain, length = np.arange(4)[:, None] * 100, np.arange(100)
    along = np.stack([chain + length[:-1], chain + length[1:]], axis=-1).reshape(-1, 2)
    across = np.stack([chain[:-1] + length[::10], chain[1:] + length[::10]], axis=-1).reshape(-1, 2)
    linked = np.concatenate([along, across])
    columns = np.concatenate([np.arange(400), linked.ravel(), np.arange(400)])
    starts = np.cumsum([0, *[1] * 400, *[2] * len(linked), 400])
    rows = Rows(starts, columns, np.random.default_rng(0).normal(size=len(columns)), 400)
    newton = NewtonMatrix(rows, np.zeros(400, dtype=bool))
    assert newton.n_left < 100  # 40 have more than two neighbours
    newton.factor(np.ones(len(starts) - 1))
    matrix = dense(rows)
    right = matrix.sum(axis=0)
    expected = np.linalg.solve(matrix.T @ matrix, right)
    assert newton.solve(right) == pytest.approx(expected, abs=1e-6)
