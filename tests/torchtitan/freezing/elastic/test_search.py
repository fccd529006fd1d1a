"""The number of microbatches that a search comes to, with times from a table."""

from dataclasses import replace
from typing import Any

import pytest

from tests.torchtitan.freezing.elastic.test_pipeline import START, elastic
from torchtitan.freezing.elastic.pipeline import MicrobatchSearch, Pipeline, candidates


def search(**changes: Any) -> MicrobatchSearch:
    return MicrobatchSearch(elastic(training__local_batch_size=24, **changes), lambda one: one)


def tried(
    searching: MicrobatchSearch, pipeline: Pipeline, table: dict[int, list[float]], rows: int
) -> list[int]:
    """Microbatches of each step that a run with such times makes until nothing is tried any more.

    Of each number of microbatches the steps take as long as the table says, one after another.
    """
    seen: list[int] = []
    pipeline = searching.begin(pipeline)
    while True:
        n = rows // (pipeline.microbatch or 1)
        if seen.count(n) == len(table[n]):
            return [*seen, n]
        seconds = table[n][seen.count(n)]
        seen.append(n)
        pipeline = searching.after_step(pipeline, seconds)


@pytest.mark.parametrize(
    ("n_ranks", "rows", "expected"),
    [
        (4, 8, [4, 8]),
        (2, 4, [2, 4]),
        (4, 24, [4, 6, 12, 24]),  # of 4 6 8 12 24
        (2, 7, [7]),
        (4, 3, []),
        (8, 10, [10]),
        (4, 120, [4, 8, 12, 24]),  # of 4 5 6 8 10 12 15 20 24, every third but one
    ],
)
def test_candidates_divide_the_rows(n_ranks: int, rows: int, expected: list[int]) -> None:
    assert candidates(n_ranks, rows) == expected


@pytest.mark.parametrize("best", [4, 6, 12, 24])
def test_the_one_with_the_least_median_stays(best: int) -> None:
    """First steps, the slowest of three and the fastest of them decide nothing."""
    table = {n: [99.0, 0.1, 5.0 + n, 90.0] for n in (4, 6, 12, 24)}
    table[best] = [99.0, 4.0, 4.0, 99.0]
    seen = tried(search(), Pipeline(START), table, rows=24)
    assert seen == [n for n in (4, 6, 12, 24) for _ in range(4)] + [best]


def test_it_is_searched_once_for_each_length_of_a_pipeline() -> None:
    searching = search()
    table = {n: [1.0, 1.0 / n, 1.0 / n, 1.0 / n] for n in (4, 6, 12, 24)}
    assert tried(searching, Pipeline(START), table, rows=24)[-1] == 24
    again = searching.begin(Pipeline((3, 1, 1, 1)))
    assert again == Pipeline((3, 1, 1, 1))  # 24 microbatches: those of the start
    assert searching.after_step(again, 1.0) == again
    # Two replicas of 2 ranks share the rows: of 2 3 4 6 12 microbatches.
    table = {n: [1.0, 1.0 * n, 1.0 * n, 1.0 * n] for n in (2, 3, 6, 12)}
    seen = tried(searching, Pipeline((5, 1), 2), table, rows=12)
    assert seen[-1] == 2
    assert searching.begin(Pipeline((4, 2), 2)).microbatch == 6


def test_a_front_that_grows_meanwhile_begins_the_search_anew() -> None:
    searching = search()
    first = searching.begin(Pipeline(START))
    for _ in range(4):
        first = searching.after_step(first, 0.1)
    assert first.microbatch == 4
    assert searching.begin(Pipeline((3, 1, 1, 1))).microbatch == 6


def test_the_time_of_the_slowest_rank_counts() -> None:
    """On this rank 4 microbatches are fastest, on another one 8."""
    elsewhere = iter([9.0, 5.0])
    job_config = elastic()
    searching = MicrobatchSearch(job_config, lambda one: max(one, next(elsewhere)))
    table = {4: [1.0, 1.0, 1.0, 1.0], 8: [2.0, 2.0, 2.0, 2.0]}
    assert tried(searching, Pipeline(START), table, rows=8)[-1] == 8


def test_where_nothing_divides_the_rows_they_stay() -> None:
    searching = MicrobatchSearch(elastic(training__local_batch_size=3), lambda one: one)
    assert searching.begin(Pipeline(START)) == Pipeline(START)
    for _ in range(5):
        assert searching.after_step(Pipeline(START), 1.0) == Pipeline(START)


def test_microbatches_that_are_tried_have_other_rows() -> None:
    job_config = elastic()
    moved = replace(Pipeline((5, 1), 2), microbatch=2).moved(job_config)
    assert moved.parallelism.pipeline_parallel_microbatch_size == 2
    assert moved.training.local_batch_size == 4
