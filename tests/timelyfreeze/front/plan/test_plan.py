"""PipeTransformer's Algorithm 1 on a small model, worked by hand."""

import pytest

from timelyfreeze.front.plan.plan import TIME, ElasticPlan, elastic_plan, replicas_of

MILLION = 1_000_000
SUBLAYERS = [2 * MILLION, 4 * MILLION] * 4
AT_START = 6 * MILLION  # of 4 ranks with 2 4 each


def plan(n_frozen: int, n_ranks: int = 4, n_microbatches: int = 8) -> ElasticPlan:
    return elastic_plan(
        SUBLAYERS, n_frozen, n_ranks, largest_at_start=AT_START, n_microbatches=n_microbatches
    )


def test_a_pipeline_shrinks_once_what_is_left_fits_into_half() -> None:
    # 18 million frozen count 3. K = 2: mean 3, variance 1 / 2; 3 + 2 is beyond, so rank 1 has all
    # of 2 4, which is M0. K = 1: 3 + 2 + 4 = 9.
    found = plan(6)
    assert (found.n_ranks, found.split, found.n_replicas, found.n_microbatches) == (2, (6, 2), 2, 4)
    assert found.largest == pytest.approx(6 * MILLION)
    assert found.n_ranks * found.n_replicas == 4
    # Only the last MLP live: 20 / 6 + 4 = 7.3 on one rank is too much, 4 on the second is not.
    assert plan(7).split == (7, 1)


def test_a_pipeline_that_cannot_shrink_is_cut_anew() -> None:
    # K = 2: 2 + 2 on rank 0, 4 + 2 + 4 = 10 > 6 on rank 1. K = 4: 2 + 2 is beyond 3.25 on rank 0;
    # 2 of 12 / 3 + 0.33; 4 of 10 / 2 + 0.44; the rest is 2 + 4.
    found = plan(4)
    assert (found.n_ranks, found.split) == (4, (4, 1, 1, 2))
    assert (found.n_replicas, found.n_microbatches) == (1, 8)


def test_whole_layers_are_coarser_units_than_the_papers() -> None:
    """Of ViT-B/16 without its head on 8 ranks, with 1 to 11 of 12 layers frozen."""
    width = 768
    attention, mlp = 4 * width**2 + 6 * width, 8 * width**2 + 7 * width
    embedding = 3 * 16**2 * width + (1 + 1 + 197) * width

    def refused(sizes: list[int]) -> list[int]:
        found = []
        sizes = [sizes[0] + embedding, *sizes[1:]]
        for n_frozen in range(1, 12):
            try:
                elastic_plan(
                    sizes,
                    n_frozen * len(sizes) // 12,
                    8,
                    largest_at_start=2 * (attention + mlp) + embedding,
                    n_microbatches=8,
                )
            except ValueError:
                found.append(n_frozen)
        return found

    assert refused([attention + mlp] * 12) == [5, 6, 7, 9]
    assert refused([attention, mlp] * 12) == []


def test_as_large_as_at_the_start_is_small_enough() -> None:
    for n_ranks, at_start in ((1, 24), (2, 23), (2, 12), (4, 11)):
        found = elastic_plan(SUBLAYERS, 0, 4, largest_at_start=at_start * MILLION, n_microbatches=8)
        assert found.n_ranks == n_ranks


def test_half_of_an_odd_number_of_ranks_is_rounded_down() -> None:
    found = elastic_plan([MILLION] * 6, 3, 3, n_microbatches=6)
    assert (found.n_ranks, found.n_replicas, found.n_microbatches) == (1, 3, 2)


@pytest.mark.parametrize(
    ("n_ranks", "each", "n_microbatches", "expected"),
    [(8, 2, 8, 4), (8, 2, 6, 3), (8, 2, 7, 1), (8, 8, 8, 1), (3, 1, 4, 2)],
)
def test_replicas_divide_the_microbatches(
    n_ranks: int, each: int, n_microbatches: int, expected: int
) -> None:
    assert replicas_of(n_ranks, each, n_microbatches) == expected


def test_by_time_frozen_layers_are_anywhere_and_the_largest_is_smallest() -> None:
    # Four frozen layers of 2 ms, four live ones of 6: at the start 12 ms on each of 4 ranks.
    times = [2.0] * 4 + [6.0] * 4

    def shrink(at_start: float) -> ElasticPlan:
        return elastic_plan(
            times, 4, 4, largest_at_start=at_start, n_microbatches=8, partition=TIME
        )

    # Five ranks would be needed for less than 12: two of the live ones share a rank.
    assert (shrink(12.0).n_ranks, shrink(12.0).largest) == (4, 12.0)
    assert shrink(17.9).n_ranks == 4
    # Two ranks: 4 x 2 + 6 = 14 and 18; or 20 and 12.
    assert shrink(18.0).n_ranks == 2
    assert shrink(18.0).split == (5, 3)
    assert shrink(32.0).split == (8,)


def test_by_time_the_memory_decides_where_it_is_known() -> None:
    times = [1.0] * 8

    def shrink(most: int) -> ElasticPlan:
        return elastic_plan(
            times,
            4,
            4,
            largest_at_start=0.0,  # not looked at
            n_microbatches=8,
            partition=TIME,
            # A live layer takes 1, a frozen one nothing.
            fits=lambda n_ranks, rank, start, stop: stop - max(start, 4) <= most,
        )

    assert shrink(4).n_ranks == 1
    # Even would be 4 4; rank 1 has room for 3 live ones, rank 0 takes one beside 4 frozen.
    assert (shrink(3).n_ranks, shrink(3).split) == (2, (5, 3))
    assert (shrink(1).n_ranks, shrink(1).split) == (4, (5, 1, 1, 1))
    with pytest.raises(ValueError, match="8 units, 4 of them frozen, cannot be cut for 4 ranks"):
        shrink(0)


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be cut for 9 ranks by parameters"):
        elastic_plan(SUBLAYERS, 1, 9, largest_at_start=0.0, n_microbatches=8)
