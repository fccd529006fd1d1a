"""Plasticity, its moving mean and its slope, against values by hand."""

import json
import math

import numpy as np
import pytest

from timelyfreeze.files import read_dataclass, to_plain
from timelyfreeze.policies.plasticity import (
    History,
    similarity_loss,
    slope,
    spread_evenly,
)

ORTHOGONAL = [[1.0, 0.0], [0.0, 2.0]]  # G Q Q^T = diag(1, 4); rows over their norm: identity
EQUAL = [[3.0, 0.0], [3.0, 0.0]]  # all of Q Q^T is 9; rows over their norm: 1 / sqrt(2)


def test_the_loss_of_two_outputs_by_hand() -> None:
    # Each of 4 elements of the difference: 1 - 1/sqrt(2) on the diagonal, -1/sqrt(2) beside it.
    wanted = (2 * (1 - math.sqrt(0.5)) ** 2 + 2 * 0.5) / 4
    assert similarity_loss(ORTHOGONAL, EQUAL) == pytest.approx(wanted, rel=1e-12)


def test_with_squared_norms_the_size_of_an_output_counts() -> None:
    # Rows (1, 0) / 1 and (0, 4) / 16; (9, 9) / 162.
    wanted = ((1 - 1 / 18) ** 2 + 2 * (1 / 18) ** 2 + (1 / 4 - 1 / 18) ** 2) / 4
    assert similarity_loss(ORTHOGONAL, EQUAL, squared=True) == pytest.approx(wanted, rel=1e-12)
    doubled = 2 * np.array(ORTHOGONAL)
    assert similarity_loss(ORTHOGONAL, doubled) == 0.0
    assert similarity_loss(ORTHOGONAL, doubled, squared=True) > 0.1


def test_turning_all_rows_changes_nothing() -> None:
    rng = np.random.default_rng(1)
    output = rng.normal(size=(5, 3))
    turned, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    assert similarity_loss(output, output @ turned) == pytest.approx(0.0, abs=1e-28)
    assert similarity_loss(output, rng.normal(size=(5, 3))) > 1e-3


def test_further_dimensions_belong_to_the_row() -> None:
    rng = np.random.default_rng(2)
    ours, theirs = rng.normal(size=(2, 4, 2, 3))
    flat = similarity_loss(ours.reshape(4, 6), theirs.reshape(4, 6))
    assert similarity_loss(ours, theirs) == flat


def test_a_row_of_zeros_is_like_nothing() -> None:
    # G has (1, 0) and (0, 0) here, the identity there.
    assert similarity_loss([[1.0, 0.0], [0.0, 0.0]], ORTHOGONAL) == 1 / 4


@pytest.mark.parametrize(
    ("n", "limit", "wanted"),
    [(3, 5, [0, 1, 2]), (10, 5, [0, 2, 4, 6, 8]), (7, 3, [0, 2, 4]), (1, 1, [0]), (0, 4, [])],
)
def test_tokens_are_taken_evenly(n: int, limit: int, wanted: list[int]) -> None:
    assert spread_evenly(n, limit).tolist() == wanted


@pytest.mark.parametrize(
    ("values", "wanted"),
    [([5.0], 0.0), ([1.0, 4.0], 3.0), ([2.0, 2.0, 2.0], 0.0), ([0.0, 1.0, 5.0], 2.5),
     ([3.0, 1.0, 0.0, 0.0], -1.0)],
)  # fmt: skip
def test_slopes_by_hand(values: list[float], wanted: float) -> None:
    assert slope(values) == pytest.approx(wanted, abs=1e-15)


def after(values: list[float], window: int = 2, tolerance: float = 0.01) -> History:
    history = History()
    for value in values:
        history = history.after(value, window, tolerance)
    return history


def test_the_moving_mean_takes_what_there_is_up_to_the_window() -> None:
    history = after([6.0, 2.0, 4.0, 0.0], window=3)
    # Means of (6), (6, 2), (6, 2, 4), (2, 4, 0), of which three are kept.
    assert history.smoothed == (4.0, 4.0, 2.0)
    assert history.values == (2.0, 4.0, 0.0)
    assert history.range == (0.0, 6.0)
    assert history.slope == -1.0


def test_a_slope_counts_by_its_size_over_the_range() -> None:
    # Means 0, 0.5: a slope of 0.5 over a range of 1, in both directions.
    for values in ([0.0, 1.0], [1.0, 0.0], [-3e9, 3e9], [1e-9, 0.0]):
        assert after(values, tolerance=0.49).stale == 0
        assert after(values, tolerance=0.51).stale == 1


def test_the_counter_begins_anew_with_a_steep_slope() -> None:
    assert [after([1.0] * n).stale for n in range(4)] == [0, 0, 1, 2], "one has no slope"
    assert after([1.0, 1.0, 1.0, 2.0]).stale == 0
    # Means 1, 1.5, 2, 2: the slope over the last two is 0 again.
    assert after([1.0, 1.0, 1.0, 2.0, 2.0]).stale == 0
    assert after([1.0, 1.0, 1.0, 2.0, 2.0, 2.0]).stale == 1


@pytest.mark.parametrize("n", [0, 1, 4])
def test_a_history_survives_a_checkpoint(n: int) -> None:
    history = after([0.1, 0.7, 0.4, 0.3][:n])
    assert read_dataclass(History, json.loads(json.dumps(to_plain(history)))) == history
