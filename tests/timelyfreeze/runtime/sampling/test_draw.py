"""Probabilities and draws, against what they must add up to and every outcome they can have."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.timelyfreeze.runtime.sampling.oracles import joint_probabilities, outcomes
from timelyfreeze.runtime.sampling.draw import (
    added_variance,
    draw_tokens,
    inclusion_probabilities,
    levelled,
    n_kept,
)

sizes_lists = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("n_tokens", "ratio", "kept"),
    [(10, 0.0, 10), (10, 0.3, 7), (10, 0.99, 1), (256, 0.5, 128), (256, 0.3, 176),
     (1024, 0.3, 704), (1024, 0.1, 928), (1000, 0.01, 984), (5000, 0.0, 5000), (9000, 0.3, 6312)],
)  # fmt: skip
def test_a_ratio_leaves_its_part_of_the_tokens(n_tokens: int, ratio: float, kept: int) -> None:
    assert n_kept(n_tokens, ratio) == kept


@pytest.mark.parametrize("ratio", [-0.1, 1.0, float("nan")])
def test_a_ratio_that_leaves_no_token_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match=r"sampling ratio is .*; it must be 0 or more and below 1"):
        n_kept(10, ratio)


@given(sizes_lists, st.data())
def test_probabilities_add_up_and_are_proportional_below_one(
    sizes: list[float], data: st.DataObject
) -> None:
    n_drawn = data.draw(st.integers(1, len(sizes)))
    p = inclusion_probabilities(torch.tensor(sizes, dtype=torch.float64), n_drawn).numpy()
    assert p.sum() == pytest.approx(n_drawn, rel=1e-9)
    assert ((p > 0.0) & (p <= 1.0)).all()
    below = p < 1.0 - 1e-9
    rates = p[below] / np.array(sizes)[below]
    assert rates == pytest.approx(np.full(len(rates), rates[:1].sum()), rel=1e-6)
    # Whoever is certain would have a probability of 1 or more at the same rate.
    if below.any():
        assert (rates[0] * np.array(sizes)[~below] >= 1.0 - 1e-6).all()


def test_tokens_of_size_zero_are_never_kept() -> None:
    p = inclusion_probabilities(torch.tensor([0.0, 3.0, 0.0, 1.0, 2.0]), 3)
    assert p.tolist() == [0.0, 1.0, 0.0, 1.0, 1.0]
    kept, factors = draw_tokens(p, 3, 0.7)
    assert kept.tolist() == [1, 3, 4]
    assert factors.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("n_positive", [0, 1, 2])
def test_places_without_a_token_count_nothing(n_positive: int) -> None:
    sizes = torch.zeros(6)
    sizes[2 : 2 + n_positive] = 5.0
    kept, factors = draw_tokens(inclusion_probabilities(sizes, 4), 4, 0.25)
    assert factors.tolist() == [1.0] * n_positive + [0.0] * (4 - n_positive)
    assert kept.tolist()[:n_positive] == list(range(2, 2 + n_positive))
    assert int(kept.max()) < 6


@given(sizes_lists, st.data())
def test_a_weighted_sum_over_every_draw_is_the_sum_itself(
    sizes: list[float], data: st.DataObject
) -> None:
    n_drawn = data.draw(st.integers(1, len(sizes)))
    terms = torch.tensor(
        data.draw(st.lists(st.floats(-1, 1), min_size=len(sizes), max_size=len(sizes)))
    )
    p = inclusion_probabilities(torch.tensor(sizes, dtype=torch.float64), n_drawn)
    mean = 0.0
    for number, length in outcomes(p.numpy()):
        kept, factors = draw_tokens(p, n_drawn, number)
        assert len(set(kept.tolist())) == n_drawn
        mean += length * float((factors * terms[kept]).double().sum())
    scale = float((terms.abs() / p).max())
    assert mean == pytest.approx(float(terms.double().sum()), abs=1e-5 * (1.0 + scale))


def test_each_token_is_kept_as_often_as_its_probability() -> None:
    p = inclusion_probabilities(torch.tensor([5.0, 1.0, 2.0, 0.5, 1.5, 9.0, 3.0]), 3).numpy()
    assert np.diag(joint_probabilities(p)) == pytest.approx(p, rel=1e-9)


def test_the_variance_is_that_of_independent_draws() -> None:
    terms = np.array([0.5, -2.0, 1.0, 3.0, -0.25])
    p = np.array([0.2, 0.5, 1.0, 0.9, 0.4])
    mean = square = 0.0
    for kept in itertools.product([False, True], repeat=len(terms)):
        chance = np.where(kept, p, 1.0 - p).prod()
        estimate = (terms / p)[list(kept)].sum()
        mean += chance * estimate
        square += chance * estimate**2
    found = added_variance(torch.tensor(np.abs(terms)), torch.tensor(p))
    assert float(found) == pytest.approx(square - mean**2, rel=1e-9)


def test_neighbours_that_are_alike_are_seldom_kept_together() -> None:
    joint = joint_probabilities(np.full(8, 0.5))
    assert joint[0, 1] == 0.0
    assert joint[0, 2] == 0.5


@given(sizes_lists, st.data())
def test_levelled_sizes_weight_no_token_more_than_twice_an_even_draw(
    sizes: list[float], data: st.DataObject
) -> None:
    n_drawn = data.draw(st.integers(1, len(sizes)))
    level = levelled(torch.tensor([0.0, *sizes], dtype=torch.float64))
    p = inclusion_probabilities(level, n_drawn)
    assert p[0] == 0.0
    assert float(1.0 / p[1:].min()) <= 2.0 * len(sizes) / n_drawn * (1.0 + 1e-9)
    # Larger tokens stay the likelier ones.
    assert p[1:][torch.tensor(sizes).argmax()] == p.max()
