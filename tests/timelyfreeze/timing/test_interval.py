"""Intervals against Student's table, by hand, and in how many draws the next batch lies in them."""

import math

import numpy as np
import pytest

from timelyfreeze.timing.batches import holds_for, interval_factor, range_of, within

# 95% quantiles by degrees of freedom, as printed in textbooks.
STUDENT = {2: 2.920, 3: 2.353, 4: 2.132, 6: 1.943, 10: 1.812, 19: 1.729, 39: 1.685}


@pytest.mark.parametrize(("freedom", "quantile"), STUDENT.items())
def test_the_factor_by_hand(freedom: int, quantile: float) -> None:
    n = freedom + 1
    errors = [0.1 if i % 2 else -0.1 for i in range(n)]
    spread = math.sqrt(n * 0.01 / (n - 1) * (1 + math.pi / (2 * n)))
    found = interval_factor([math.exp(error) for error in errors])
    assert found is not None
    assert math.log(found) == pytest.approx(quantile * spread, rel=0.013)


def test_batches_in_a_row_on_one_speed_count_as_fewer() -> None:
    """Blocks of 3: of 11 neighbours 8 are alike and 3 are not; two apart, 4 are and 6 are not."""
    errors = [0.1, 0.1, 0.1, -0.1, -0.1, -0.1] * 2
    r_1 = (8 - 3) / 12
    r_2 = (4 - 6) / 12
    assert r_2 < 0.0
    told = 12 / (1 + 2 * (1 - 1 / 12) * r_1)
    spread = math.sqrt(12 * 0.01 / 11 * (1 + math.pi / (2 * told)))
    found = interval_factor([math.exp(error) for error in errors])
    assert found is not None
    # Between Student's quantiles of 5 and 6 degrees of freedom.
    assert 1.943 * spread < math.log(found) < 2.015 * spread
    assert interval_factor([math.exp(error) for error in errors[::-1]]) == pytest.approx(found)


def test_what_all_batches_are_late_by_is_in_it() -> None:
    late = interval_factor([1.08] * 20)
    assert late is not None
    assert late > 1.08
    assert interval_factor([1.0] * 20) == 1.0


@pytest.mark.parametrize(
    "missed_by",
    [(), (1.0, 1.1), (1.0, 1.1, 0.0), (1.0, math.nan, 1.0), (1.0, math.inf, 1.0),
     (1e300, 1e-300, 1e300)],
)  # fmt: skip
def test_too_few_batches_and_times_that_cannot_be_have_none(missed_by: tuple[float, ...]) -> None:
    assert interval_factor(missed_by) is None
    assert within(None) == "interval unknown, fewer than 3 batches timed"
    assert range_of(100.0, None) == ""


def next_batches_within(n: int, spread: float) -> tuple[float, float]:
    """Part of the draws in which batch n + 1 lies in the interval of n; and the mean factor."""
    rng = np.random.default_rng(n)
    hits, factors = 0, []
    for _ in range(3000):
        times = np.exp(rng.normal(0.0, spread, n + 1))
        predicted = np.median(times[:n])
        factor = interval_factor(list(times[:n] / predicted))
        assert factor is not None
        factors.append(factor)
        hits += 1.0 / factor <= times[n] / predicted <= factor
    return hits / 3000, float(np.mean(factors))


@pytest.mark.parametrize("n", [7, 38])
def test_nine_of_ten_next_batches_lie_in_it(n: int) -> None:
    """0.9 and, as the median is a little nearer to its own batches than to others, not below."""
    hits, wide = next_batches_within(n, 0.1)
    assert 0.89 <= hits <= 0.93
    hits, narrow = next_batches_within(n, 0.02)
    assert 0.89 <= hits <= 0.93
    assert narrow - 1.0 < 0.25 * (wide - 1.0)


def test_the_words() -> None:
    assert within(1.25) == (
        "9 of 10 batches within -20.0% to +25.0% if the machine goes on as measured"
    )
    assert range_of(1000.0, 1.25) == "800.0 to 1,250.0 ms"
    assert holds_for(4, None) == holds_for(4, 4.0) == "a device or core of its own for each rank"
    assert holds_for(4, 2.0) == "4 ranks that share 2 cores"
    assert holds_for(2, 1.0) == "2 ranks that share 1 core"
