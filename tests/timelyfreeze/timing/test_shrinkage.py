"""Medians with less noise: a group by hand, and random ones whose truth is known."""

import math

import numpy as np
import pytest

from timelyfreeze.timing.bounds import less_noisy_medians


def group(truth: list[float], noise: float, n_samples: int, seed: int) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [rng.normal(value, noise, n_samples).tolist() for value in truth]


def medians(samples: list[list[float]]) -> np.ndarray:
    return np.array([np.median(values) for values in samples])


def test_a_group_by_hand() -> None:
    # Medians 9, 10, 11 and 14 lie 4, 1, 0 and 9 from their mean 11, squared: 14 in all. Samples lie
    # 0, 1 and 1 from their medians, each of which has sqrt(3 / 2) to make up for.
    samples = [[value - 1.0, value, value + 1.0] for value in (9.0, 10.0, 11.0, 14.0)]
    noise = (1.4826 * math.sqrt(1.5)) ** 2 * (math.pi / 2) / 3
    kept = 1.0 - 1.0 * noise / 14.0
    expected = [11.0 + kept * off for off in (-2.0, -1.0, 0.0, 3.0)]
    assert less_noisy_medians(samples) == pytest.approx(expected)


def test_noise_that_explains_everything_leaves_the_mean() -> None:
    samples = [[value - 9.0, value, value + 9.0] for value in (10.0, 10.5, 11.0, 10.5)]
    assert less_noisy_medians(samples) == pytest.approx([10.5] * 4)


@pytest.mark.parametrize(
    "samples",
    [
        [[1.0], [2.0], [3.0], [4.0]],  # whose noise nobody knows
        [[1.0, 1.5, 1.1], [2.0, 2.5, 2.2], [3.0, 3.1, 3.2]],  # too few
        [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [4.0, 4.0]],  # without noise
        [[5.0, 6.0], [5.0, 6.0], [5.0, 6.0], [5.0, 6.0]],  # without differences
        [[1.0, 1.2, 1.1], [2.0, 2.2, 2.1], [3.0], [4.0, 4.1, 4.2]],
    ],
)
def test_plain_medians_stay_where_noise_is_unknown_or_none(samples: list[list[float]]) -> None:
    assert less_noisy_medians(samples).tolist() == medians(samples).tolist()


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.3])
def test_alike_actions_are_nearer_the_truth(spread: float) -> None:
    """Over many groups the squared distance to the truth is smaller than the medians'."""
    plain = better = 0.0
    for seed in range(40):
        truth = (10.0 + spread * np.random.default_rng(1000 + seed).standard_normal(8)).tolist()
        samples = group(truth, 0.5, 8, seed)
        plain += float(((medians(samples) - truth) ** 2).sum())
        better += float(((less_noisy_medians(samples) - truth) ** 2).sum())
    assert better < 0.8 * plain


def test_real_differences_stay() -> None:
    truth = [10.0, 12.0, 14.0, 16.0, 18.0, 20.0]
    samples = group(truth, 0.3, 8, 3)
    assert less_noisy_medians(samples) == pytest.approx(medians(samples), abs=0.02)


def test_passes_that_were_held_up_are_not_taken_for_noise() -> None:
    samples = [[v, v + 0.1, v - 0.1, v + 0.05, v - 0.05, 90.0] for v in (10.0, 12.0, 14.0, 16.0)]
    assert less_noisy_medians(samples) == pytest.approx(medians(samples), abs=0.02)


def test_order_and_units_do_not_matter() -> None:
    samples = group([10.0, 10.2, 10.4, 10.1, 10.3], 0.4, 6, 11)
    found = less_noisy_medians(samples)
    assert less_noisy_medians(samples[::-1]) == pytest.approx(found[::-1])
    scaled = [[1e-6 * v for v in values] for values in samples]
    assert less_noisy_medians(scaled) == pytest.approx(1e-6 * found, rel=1e-9)
    assert found.mean() == pytest.approx(medians(samples).mean())
