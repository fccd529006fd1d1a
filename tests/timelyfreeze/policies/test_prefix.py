import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timelyfreeze.helpers.toy_model import of_tensors, toy_layout
from timelyfreeze.policies.prefix import (
    LARGEST_CHANGE,
    grow,
    layer_norms,
    leading_run,
    relative_change,
    whole_layers,
)


def test_the_norm_of_a_block_is_that_of_its_tensors_together() -> None:
    layout = toy_layout(3)
    norms = layer_norms(layout, of_tensors([3.0, 0.0, 5.0], around=1e6))
    np.testing.assert_allclose(norms, [3.0, 0.0, 5.0], rtol=1e-15)


def test_changes_relative_to_what_was_there() -> None:
    change = np.array([1.0, -1.0, 0.0, 0.0, 3.0, -3.0])
    before = np.array([4.0, 2.0, 5.0, 0.0, 0.0, 0.0])
    expected = [0.25, -0.5, 0.0, 0.0, LARGEST_CHANGE, LARGEST_CHANGE]
    assert relative_change(change, before).tolist() == expected
    assert np.isnan(relative_change(np.array([np.nan]), np.array([1.0]))).all()


@pytest.mark.parametrize(
    ("flags", "length"),
    [([], 0), ([True], 1), ([False, True], 0), ([True, True, False, True], 2), ([True] * 4, 4)],
)
def test_a_run_ends_at_the_first_that_is_not_set(flags: list[bool], length: int) -> None:
    assert leading_run(np.array(flags, dtype=np.bool_)) == length


def test_a_prefix_grows_to_what_is_wanted_or_to_the_bound() -> None:
    assert grow(2.0, 10, 0.25, 9) == 4.0  # 2 + 8 / 4
    assert grow(2.0, 10, 0.25, 3) == 3.0
    assert grow(2.5, 10, 0.2, 2) == 2.5, "what is frozen stays so"


def test_a_prefix_of_nine_layers_grows_by_thirds() -> None:
    length, seen = 0.0, []
    for _ in range(4):
        length = grow(length, 9, 1 / 3, 9)
        seen.append(whole_layers(length, 9))
    assert seen == [3, 5, 6, 7]  # 3, 5, 19/3, 65/9


def test_a_small_rate_does_not_get_stuck() -> None:
    # One tenth of two layers is never a whole one, but 1 - 0.9^7 is more than a half.
    length, seen = 0.0, []
    for _ in range(7):
        length = grow(length, 2, 0.1, 2)
        seen.append(whole_layers(length, 2))
    assert seen == [0, 0, 0, 0, 0, 0, 1]


def test_whole_numbers_survive_rounding() -> None:
    assert 100 * 0.29 < 29.0  # what this is about
    assert whole_layers(100 * 0.29, 100) == 29
    assert whole_layers(28.9, 100) == 28


@given(st.integers(1, 60), st.floats(0.01, 0.99))
def test_the_last_layer_is_never_frozen(n_layers: int, rate: float) -> None:
    length = 0.0
    for _ in range(4000):
        length = grow(length, n_layers, rate, n_layers)
    assert whole_layers(length, n_layers) == n_layers - 1
