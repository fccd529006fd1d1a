import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyfreeze.planning.interior.elimination import Elimination


def random_matrix(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A symmetric matrix with a diagonal that outweighs the rest, and columns of no two linked."""
    chosen = rng.random(n) < 0.5
    matrix = np.where(rng.random((n, n)) < 4.0 / n, rng.uniform(-1.0, 1.0, (n, n)), 0.0)
    matrix[np.ix_(chosen, chosen)] = 0.0
    matrix = np.triu(matrix, 1)
    matrix = matrix + matrix.T + np.diag(2.0 + np.abs(matrix + matrix.T).sum(axis=0))
    low, high = np.nonzero(np.triu(matrix))
    shuffled = rng.permutation(len(low))
    return matrix, chosen, np.stack([low, high])[:, shuffled]


@given(st.integers(0, 10**6), st.integers(1, 40))
def test_what_is_left_is_the_schur_complement(seed: int, n: int) -> None:
    matrix, chosen, (low, high) = random_matrix(np.random.default_rng(seed), n)
    elimination = Elimination(n, low, high, chosen)
    left = np.zeros((n - chosen.sum(),) * 2)
    entries = elimination.factor(matrix[low, high])
    left[elimination.low, elimination.high] = left[elimination.high, elimination.low] = entries
    inner, outer = np.ix_(chosen, chosen), np.ix_(~chosen, ~chosen)
    between = matrix[np.ix_(~chosen, chosen)]
    schur = matrix[outer] - between @ np.linalg.inv(matrix[inner]) @ between.T
    assert left == pytest.approx(schur, abs=1e-12)
    # And a solution of that, carried back, solves the whole.
    right = np.random.default_rng(seed).normal(size=n)
    kept = np.linalg.solve(schur, elimination.forward(right)) if len(schur) else np.zeros(0)
    assert matrix @ elimination.backward(right, kept) == pytest.approx(right, abs=1e-9)
