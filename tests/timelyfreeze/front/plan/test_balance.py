"""Cuts of a model, worked by hand and against every cut there is."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timelyfreeze.front.plan.plan import min_max_balance, paper_balance

MILLION = 1_000_000
# Four layers of an attention of 2 and an MLP of 4 million parameters.
SUBLAYERS = [2 * MILLION, 4 * MILLION] * 4


def test_the_papers_cut_by_hand() -> None:
    # K = 2: mean 12, variance 1, so rank 0 takes 2 4 2 4 (12 < 12 + 1/2) and not the next 2.
    assert paper_balance(SUBLAYERS, 2) == ((4, 4), 12 * MILLION)
    # K = 4: 6 < 6 + 1/4, 6 < 6 + 1/3, 6 < 6 + 1/2.
    assert paper_balance(SUBLAYERS, 4) == ((2, 2, 2, 2), 6 * MILLION)
    assert paper_balance(SUBLAYERS, 1) == ((8,), 24 * MILLION)


def test_the_variance_is_of_what_is_left_and_over_the_ranks_left() -> None:
    # Rank 0: mean 11, variance of 1 1 1 9 9 1 = 14.22, over 2: limit 18.11; 1 1 1 9 is 12, not 21.
    assert paper_balance([MILLION * n for n in (1, 1, 1, 9, 9, 1)], 2) == ((4, 2), 12 * MILLION)
    # K = 3: 22 / 3 + 14.22 / 3 = 12.07, the same; then 10 / 2 + 16 / 2 = 13, and rank 1 has all.
    assert paper_balance([MILLION * n for n in (1, 1, 1, 9, 9, 1)], 3) == (
        (4, 2, 0), 12 * MILLION,
    )  # fmt: skip


def test_of_the_frozen_units_a_fraction_counts_and_on_the_first_rank() -> None:
    # 12 million frozen count 2. Left 2 4 2 4: mean 6, variance 1 / 2, limit 6.5. 2 + 2, not 8.
    assert paper_balance(SUBLAYERS, 2, 4, 1 / 6) == ((1, 3), pytest.approx(10 * MILLION))
    # All of it: 12 + 2 is beyond the limit already.
    assert paper_balance(SUBLAYERS, 2, 4, 1.0) == ((0, 4), 12 * MILLION)
    # Nothing of it: 2 4, which is 6 < 6.5, and not 8.
    assert paper_balance(SUBLAYERS, 2, 4, 0.0) == ((2, 2), 6 * MILLION)


def test_the_unit_of_the_variance_is_a_million() -> None:
    # Mean 1.2, variance 0.01 / 2: 1.2 < 1.205 as above, but 1.205 < 1.205 is not.
    sizes = [200_000, 400_000] * 4
    assert paper_balance(sizes, 2)[0] == (4, 4)
    # 2 and 4 parameters: mean 12e-6, variance 1e-12 / 2. Still a little above the mean.
    assert paper_balance([2, 4] * 4, 2)[0] == (4, 4)
    # In parameters the variance would be 1e12 / 2 and rank 0 would take everything.


def test_alike_units_have_no_variance_and_rank_0_gets_one_less() -> None:
    assert paper_balance([MILLION] * 8, 2) == ((3, 5), 5 * MILLION)
    # A third is no binary fraction; a tie is a tie all the same.
    assert paper_balance([MILLION // 10] * 9, 3) == ((2, 3, 4), 4 * MILLION // 10)


def test_a_sixth_is_a_sixth() -> None:
    # 36 million frozen count 6. Left 6 18: limit 12 + 36 / 2; 6 + 6 + 18 is not below 30.
    sizes = [6 * MILLION] * 7 + [18 * MILLION]
    assert paper_balance(sizes, 2, 6, 1 / 6) == ((1, 1), 18 * MILLION)


def cuts(n_units: int, n_ranks: int) -> Iterator[tuple[int, ...]]:
    for bars in itertools.combinations(range(1, n_units), n_ranks - 1):
        ends = [0, *bars, n_units]
        yield tuple(b - a for a, b in itertools.pairwise(ends))


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.integers(1, 4),
    st.sets(st.tuples(st.integers(0, 3), st.integers(0, 7), st.integers(1, 8)), max_size=25),
)
def test_the_most_even_cut_is_the_best_of_all(
    sizes: list[int], n_ranks: int, too_full: set[tuple[int, int, int]]
) -> None:
    def spans(cut: tuple[int, ...]) -> list[tuple[int, int, int]]:
        ends = [0, *itertools.accumulate(cut)]
        return [(rank, a, b) for rank, (a, b) in enumerate(itertools.pairwise(ends))]

    def loads(cut: tuple[int, ...]) -> list[int]:
        return [sum(sizes[a:b]) for _, a, b in spans(cut)]

    allowed = [c for c in cuts(len(sizes), n_ranks) if not too_full.intersection(spans(c))]
    found = min_max_balance(sizes, n_ranks, lambda *span: span not in too_full)
    if not allowed:
        assert found is None
        return
    assert found is not None
    assert found[1] == max(loads(found[0])) == min(max(loads(c)) for c in allowed)
    best = min((max(loads(c)), sum(n * n for n in loads(c))) for c in allowed)
    assert (max(loads(found[0])), sum(n * n for n in loads(found[0]))) == best
    assert found[0] in allowed
