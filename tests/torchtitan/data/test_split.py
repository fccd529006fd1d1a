import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan.data.sources import ALL_EXAMPLES, ExampleSplit, fraction_error

SHARES = st.floats(0.0, 0.95)


@given(n_examples=st.integers(20, 500), fraction=SHARES)
def test_the_two_parts_are_disjoint_and_complete(n_examples: int, fraction: float) -> None:
    trained = ExampleSplit(fraction).indices(n_examples).tolist()
    held_out = ExampleSplit(fraction, held_out=True).indices(n_examples).tolist()
    assert sorted(trained + held_out) == list(range(n_examples))
    assert trained == sorted(trained), "in the order of the data set"
    assert abs(len(held_out) - fraction * n_examples) <= 0.5


@given(n_examples=st.integers(20, 500), fractions=st.tuples(SHARES, SHARES))
def test_a_smaller_fraction_lies_within_a_larger_one(
    n_examples: int, fractions: tuple[float, float]
) -> None:
    small, large = (ExampleSplit(s, held_out=True).indices(n_examples) for s in sorted(fractions))
    assert set(small.tolist()) <= set(large.tolist())


def test_held_out_examples_are_always_the_same_and_from_everywhere() -> None:
    examples = ExampleSplit(0.25, held_out=True).indices(1000)
    assert examples.tolist() == ExampleSplit(0.25, held_out=True).indices(1000).tolist()
    # Each hundred examples has about 25: four standard deviations of the hypergeometric law are 16.
    per_hundred = np.bincount(examples // 100, minlength=10)
    assert per_hundred.min() >= 9
    assert per_hundred.max() <= 41
    # And so have the first hundred of them, which a short validation reads.
    assert np.bincount(examples[:100] // 500, minlength=2).min() >= 30


def test_without_a_fraction_everything_is_trained_on() -> None:
    assert ALL_EXAMPLES.indices(4).tolist() == [0, 1, 2, 3]
    assert ExampleSplit(0.0, held_out=True).indices(4).tolist() == []
    assert ALL_EXAMPLES.indices(4).dtype == np.int64


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 1.5, float("nan")])
def test_a_fraction_outside_its_range_is_refused(fraction: float) -> None:
    text = f"data.validation_fraction is {fraction}; it must lie in [0, 1)"
    assert fraction_error(fraction) == text
    with pytest.raises(
        ValueError, match=r"data\.validation_fraction is .*; it must lie in \[0, 1\)"
    ):
        ExampleSplit(fraction)


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.99])
def test_a_fraction_within_its_range_is_no_error(fraction: float) -> None:
    assert fraction_error(fraction) is None


@pytest.mark.parametrize("held_out", [True, False])
def test_a_fraction_that_leaves_nothing_to_train_on_is_refused(held_out: bool) -> None:
    with pytest.raises(ValueError, match=r"validation_fraction is 0\.9, .* all of 4 examples"):
        ExampleSplit(0.9, held_out).indices(4)
