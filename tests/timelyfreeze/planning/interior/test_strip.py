import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyfreeze.planning.interior.strip import Strip, StripError


def random_pattern(rng: np.random.Generator, n: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Entries of a matrix with ``width`` columns beside each other, in a shuffled order."""
    low, high = np.triu_indices(n)
    near = (high - low <= width) & ((rng.random(len(low)) < 0.5) | (low == high))
    shuffled = rng.permutation(n)
    a, b = shuffled[low[near]], shuffled[high[near]]
    return np.minimum(a, b), np.maximum(a, b)


def dense(n: int, low: np.ndarray, high: np.ndarray, entries: np.ndarray) -> np.ndarray:
    matrix = np.zeros((n, n))
    matrix[low, high] = entries
    matrix[high, low] = entries
    return matrix


@given(st.integers(0, 10**6), st.integers(1, 150), st.integers(0, 12))
def test_solves_as_a_dense_matrix_does(seed: int, n: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    low, high = random_pattern(rng, n, width)
    # Diagonally dominant, so positive definite. Width 0 is n parts without a link.
    entries = np.where(low == high, 1.0, rng.uniform(-1.0, 1.0, len(low)) / (2 * width + 1))
    strip = Strip(n, low, high)
    strip.factor(entries)
    right = rng.normal(size=(n, 3))
    expected = np.linalg.solve(dense(n, low, high, entries), right)
    assert strip.solve(right) == pytest.approx(expected, abs=1e-10)
    assert strip.solve(right[:, 0]) == pytest.approx(expected[:, 0], abs=1e-10)


def test_a_long_strip_has_narrow_blocks() -> None:
    rng = np.random.default_rng(0)
    low, high = random_pattern(rng, 4000, 5)
    # Two levels may have to be joined to reach the least width of a block.
    assert Strip(4000, low, high).widest < 100


def test_factors_again() -> None:
    low, high = np.array([0, 0, 1]), np.array([0, 1, 1])
    strip = Strip(2, low, high)
    for off in (0.5, -0.25):
        strip.factor(np.array([1.0, off, 1.0]))
        expected = np.linalg.solve([[1.0, off], [off, 1.0]], [1.0, 2.0])
        assert strip.solve(np.array([1.0, 2.0])) == pytest.approx(expected, rel=1e-9)


def test_an_indefinite_matrix_is_refused() -> None:
    strip = Strip(2, np.array([0, 0, 1]), np.array([0, 1, 1]))
    with pytest.raises(StripError, match="indefinite by more than 1e-07"):
        strip.factor(np.array([1.0, 2.0, 1.0]))


def test_a_singular_matrix_is_nudged() -> None:
    strip = Strip(2, np.array([0, 0, 1]), np.array([0, 1, 1]))
    strip.factor(np.array([1.0, 1.0, 1.0]))
    assert strip.solve(np.array([1.0, 1.0])) == pytest.approx([0.5, 0.5], rel=1e-6)
