"""A policy's choice, brought to a freeze ratio: Algorithm 2 of arXiv:2602.05754, first stages."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyfreeze.policies.selection import (
    ParameterTable,
    build_parameter_table,
    fit_to_ratio,
    fit_whole_stage,
)

# A block's proportions, twice; sizes differ by more than two orders of magnitude.
UNEQUAL = (512, 128, 512, 1024, 1024, 4, 512, 128, 512, 1024, 1024, 4)
# Of a policy that freezes the first block but for one of its tensors.
FIRST_BLOCK = (True, True, True, True, False, True) + 6 * (False,)


def table_of(*sizes: int) -> ParameterTable:
    return build_parameter_table((f"layers.{i}.w", size) for i, size in enumerate(sizes))


def choice(*numbers: int, n: int) -> np.ndarray:
    return np.isin(np.arange(n), numbers)


def fraction_of(sizes: tuple[int, ...], mask: np.ndarray) -> float:
    return sum(size for size, frozen in zip(sizes, mask, strict=True) if frozen) / sum(sizes)


def draws(sizes: tuple[int, ...], chosen: np.ndarray, ratio: float, n: int) -> np.ndarray:
    table, rng = table_of(*sizes), np.random.default_rng(0)
    return np.stack([fit_to_ratio(table, chosen, ratio, rng) for _ in range(n)])


# --- the three cases ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "numbers", "ratio"),
    [
        ((5,) * 10, (0, 4, 9), 0.3),
        ((6, 1, 1), (1, 2), 0.25),  # two small tensors of three
        ((6, 1, 1), (0,), 0.75),
        ((3, 5), (), 0.0),
        ((3, 5), (0, 1), 1.0),
    ],
)
def test_a_choice_of_just_the_ratio_stands(
    sizes: tuple[int, ...], numbers: tuple[int, ...], ratio: float
) -> None:
    chosen = choice(*numbers, n=len(sizes))
    assert (draws(sizes, chosen, ratio, 200) == chosen).all()


def test_too_small_a_choice_is_filled_up() -> None:
    # 7 of 10 tensors are to be frozen; 3 are chosen, so 4 of the other 7 are drawn.
    chosen = choice(0, 4, 9, n=10)
    masks = draws((5,) * 10, chosen, 0.7, 300)
    assert masks[:, chosen].all()
    assert set(masks.sum(axis=1).tolist()) == {7}
    assert len({mask.tobytes() for mask in masks}) > 20  # of 35 ways


def test_too_large_a_choice_is_trimmed() -> None:
    # 5 of 10 tensors are to be frozen; 8 are chosen, so 3 of these are drawn to stay live.
    chosen = ~choice(2, 7, n=10)
    masks = draws((5,) * 10, chosen, 0.5, 300)
    assert not masks[:, ~chosen].any()
    assert set(masks.sum(axis=1).tolist()) == {5}
    assert len({mask.tobytes() for mask in masks}) > 30  # of 56 ways


@st.composite
def fits(draw: st.DrawFn) -> tuple[tuple[int, ...], np.ndarray, float, int]:
    """Sizes, choice, ratio and seed; often a ratio that is the choice's share or close to it."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 7, 50, 400]), min_size=1, max_size=20))
    chosen = np.array(draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes))))
    fraction = fraction_of(tuple(sizes), chosen)
    near = st.sampled_from([np.nextafter(fraction, 0), fraction, np.nextafter(fraction, 1)])
    ratio = draw(st.floats(0.0, 1.0) | near.map(float))
    return tuple(sizes), chosen, ratio, draw(st.integers(0, 2**32))


@given(fits())
def test_any_choice_is_kept_within_or_around_the_mask_and_the_fraction_near_the_ratio(
    fit: tuple[tuple[int, ...], np.ndarray, float, int],
) -> None:
    sizes, chosen, ratio, seed = fit
    before = chosen.copy()
    mask = fit_to_ratio(table_of(*sizes), chosen, ratio, np.random.default_rng(seed))
    assert mask.dtype == np.bool_
    assert np.array_equal(chosen, before)
    fraction = fraction_of(sizes, chosen)
    if fraction <= ratio:
        assert mask[chosen].all()
    if fraction >= ratio:
        assert not mask[~chosen].any()
    # At most one tensor of each size is rounded, and only those in question can be.
    in_question = ~chosen if fraction < ratio else chosen
    rounded = sum({size for size, asked in zip(sizes, in_question, strict=True) if asked})
    assert abs(fraction_of(sizes, mask) - ratio) <= rounded / sum(sizes) + 1e-12


@given(st.integers(1, 40), st.data())
def test_equal_tensors_miss_the_ratio_by_less_than_one(n: int, data: st.DataObject) -> None:
    chosen = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    ratio = data.draw(st.floats(0.0, 1.0))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    mask = fit_to_ratio(table_of(*(7,) * n), chosen, ratio, rng)
    assert math.floor(ratio * n - 1e-9) <= mask.sum() <= math.ceil(ratio * n + 1e-9)


# --- probabilities --------------------------------------------------------------------------------

CASES = [
    # sizes, chosen, ratio, probability of each tensor in question; fractions by hand.
    ((5,) * 10, choice(0, 1, 2, n=10), 0.35, 0.5 / 7),  # half a tensor among seven
    ((5,) * 10, choice(0, 1, 2, n=10), 0.8, 5 / 7),
    ((5,) * 10, ~choice(3, n=10), 0.4, 4 / 9),
    ((6, 1, 1, 2, 2), choice(1, 3, n=5), 0.5, 3 / 9),  # 3 of 12 are chosen, 6 wanted
    ((6, 1, 1, 2, 2), choice(0, 1, 2, n=5), 0.25, 3 / 8),  # 8 of 12 are chosen, 3 wanted
    ((6, 1, 1, 2, 2), choice(n=5), 0.6, 0.6),
    ((6, 1, 1, 2, 2), ~choice(n=5), 0.6, 0.6),
    (UNEQUAL, np.array(FIRST_BLOCK), 0.8, (0.8 * 6408 - 2180) / 4228),
    (UNEQUAL, np.array(FIRST_BLOCK), 0.2, 0.2 * 6408 / 2180),
]
N_DRAWS = 2000
# A right probability misses by so many standard deviations once in ten million.
SIGMAS = 5.3


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "chosen", "ratio", "probability"), CASES)
def test_tensors_in_question_are_equally_likely_and_the_expected_fraction_is_the_ratio(
    sizes: tuple[int, ...], chosen: np.ndarray, ratio: float, probability: float
) -> None:
    masks = draws(sizes, chosen, ratio, N_DRAWS)
    in_question = ~chosen if fraction_of(sizes, chosen) < ratio else chosen
    hits = masks[:, in_question].sum(axis=0)
    spread = math.sqrt(N_DRAWS * probability * (1.0 - probability))
    assert np.abs(hits - N_DRAWS * probability).max() < SIGMAS * spread
    fractions = masks @ np.array(sizes) / sum(sizes)
    standard_error = float(fractions.std()) / math.sqrt(N_DRAWS)
    assert abs(float(fractions.mean()) - ratio) < SIGMAS * standard_error + 1e-12


@pytest.mark.parametrize("ratio", [0.03, 0.34, 0.5, 0.8])
@pytest.mark.parametrize("front", [(), (0, 1), (0, 1, 2, 3, 4)])
def test_a_first_stage_is_frozen_as_far_as_the_front_or_whole(
    front: tuple[int, ...], ratio: float
) -> None:
    sizes = (6, 1, 1, 2, 2)
    table, rng = table_of(*sizes), np.random.default_rng(0)
    chosen = choice(*front, n=5)
    masks = np.stack([fit_whole_stage(table, chosen, ratio, rng) for _ in range(N_DRAWS)])
    fraction = fraction_of(sizes, chosen)
    # 0.34 is below the front's 7 of 12, so a part of the draws freezes nothing; 0.8 is above.
    either, other = (fraction, 1.0) if fraction < ratio else (0.0, fraction)
    fractions = masks @ np.array(sizes) / sum(sizes)
    assert set(fractions.tolist()) == {either, other}
    spread = (other - either) / 2 / math.sqrt(N_DRAWS)
    assert abs(float(fractions.mean()) - ratio) < SIGMAS * spread


@pytest.mark.parametrize("front", [(), (0, 1), (0, 1, 2)])
def test_ends_of_a_first_stage_are_exact_and_leave_the_generator_alone(
    front: tuple[int, ...],
) -> None:
    rng = np.random.default_rng(0)
    before = rng.bit_generator.state
    chosen = choice(*front, n=3)
    assert not fit_whole_stage(table_of(9, 4, 1), chosen, 0.0, rng).any()
    assert fit_whole_stage(table_of(9, 4, 1), chosen, 1.0, rng).all()
    assert rng.bit_generator.state == before


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [(), (1, 2), (0, 1, 2, 3)])
def test_ratios_of_0_and_1_are_exact(chosen: tuple[int, ...]) -> None:
    mask = choice(*chosen, n=4)
    assert not draws((9, 4, 4, 1), mask, 0.0, 50).any()
    assert draws((9, 4, 4, 1), mask, 1.0, 50).all()


def test_a_stage_without_parameters() -> None:
    nothing = np.zeros(0, dtype=np.bool_)
    for ratio in (0.0, 0.5, 1.0):
        for fit in (fit_to_ratio, fit_whole_stage):
            assert fit(table_of(), nothing, ratio, np.random.default_rng(0)).tolist() == []


def test_the_same_generator_gives_the_same_mask() -> None:
    chosen = np.array(FIRST_BLOCK)
    masks = [
        fit_to_ratio(table_of(*UNEQUAL), chosen, 0.7, np.random.default_rng(5)) for _ in range(2)
    ]
    assert np.array_equal(*masks)
