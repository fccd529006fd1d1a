import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyfreeze.interior.newton import NewtonMatrix
from timelyfreeze.interior.rows import Rows


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
    # Any choice is allowed: those that share a row with another are kept after all.
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
    # Eight chains of 500 columns with a link between neighbouring chains at every tenth column.
    chain, length = np.arange(8)[:, None] * 500, np.arange(500)
    along = np.stack([chain + length[:-1], chain + length[1:]], axis=-1).reshape(-1, 2)
    across = np.stack([chain[:-1] + length[::10], chain[1:] + length[::10]], axis=-1).reshape(-1, 2)
    pairs = np.concatenate([along, across])
    columns = np.concatenate([np.arange(4000), pairs.ravel(), np.arange(4000)])
    starts = np.cumsum([0, *[1] * 4000, *[2] * len(pairs), 4000])
    rows = Rows(starts, columns, np.random.default_rng(0).normal(size=len(columns)), 4000)
    newton = NewtonMatrix(rows, np.zeros(4000, dtype=bool))
    assert newton.n_left < 1000  # 400 have more than two neighbours
    weights = np.ones(len(starts) - 1)
    newton.factor(weights)
    matrix = dense(rows)
    right = matrix.sum(axis=0)
    expected = np.linalg.solve(matrix.T @ matrix, right)
    assert newton.solve(right) == pytest.approx(expected, abs=1e-6)
