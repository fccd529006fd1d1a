"""The most even split, against a search through all of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.timelyfreeze.whatif.stages_by_hand import MODEL as TIMES
from tests.timelyfreeze.whatif.test_rank_memory import MODEL as BYTES
from timelyfreeze.schedule.order import (
    ScheduleOrder,
    gpipe_order,
    one_f_one_b_order,
    parse_order,
    stages_of_ranks,
)
from timelyfreeze.whatif.grid import Split
from timelyfreeze.whatif.partition import (
    Load,
    PartParameters,
    Span,
    memory_load,
    min_max_split,
    parameter_load,
    time_load,
)
from timelyfreeze.whatif.rank_memory import parts_of, rank_memory

LOOPED = (0, 1, 0, 1)
IN_V = (0, 1, 2, 2, 1, 0)


def all_splits(n_layers: int, least: Sequence[int]) -> Iterator[Split]:
    """Every way to hand out the layers, written without looking at the library."""
    for split in itertools.product(range(n_layers + 1), repeat=len(least)):
        if sum(split) == n_layers and all(n >= m for n, m in zip(split, least, strict=True)):
            yield split


def split_of(
    n_layers: int, stage_to_rank: Sequence[int], load: Any, least: Split, *, are_alike: bool = True
) -> Split:
    return min_max_split(n_layers, Load(load, stages_of_ranks(stage_to_rank), least, are_alike))


class Loads:
    """A table of what each stage's layers add to its rank, drawn so that none is below another."""

    def __init__(self, seed: int, stage_to_rank: Sequence[int], n_layers: int) -> None:
        rng = random.Random(seed)
        self.stages = [
            [s for s, rank in enumerate(stage_to_rank) if rank == r]
            for r in range(max(stage_to_rank) + 1)
        ]
        self.table = [
            list(itertools.accumulate(rng.choice([0, 1, 1, 3, 10]) for _ in range(n_layers + 1)))
            for _ in stage_to_rank
        ]

    def __call__(self, rank: int, spans: Sequence[Span]) -> list[int]:
        pairs = zip(self.stages[rank], spans, strict=True)
        return [self.table[s][stop - start] for s, (start, stop) in pairs]

    def of_ranks(self, split: Split) -> list[list[int]]:
        ends = list(itertools.accumulate(split))
        return [
            self(rank, [(ends[s] - split[s], ends[s]) for s in stages])
            for rank, stages in enumerate(self.stages)
        ]

    def order(self, split: Split) -> tuple[int, int, int, int]:
        """What the split is judged by, the most important first."""
        parts = self.of_ranks(split)
        return (
            max(map(sum, parts)),
            sum(sum(each) ** 2 for each in parts),
            sum(part**2 for each in parts for part in each),
            sum(n**2 for n in split),
        )


class Fullest(Loads):
    """Of a rank's stages the fuller one counts twice: loads that are no sums."""

    def __call__(self, rank: int, spans: Sequence[Span]) -> list[int]:
        each = super().__call__(rank, spans)
        return [sum(each) + max(each)]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", [Loads, Fullest])
@pytest.mark.parametrize(
    ("stage_to_rank", "n_layers", "least"),
    [
        ((0, 1, 2), 9, (0, 1, 0)),
        ((0, 1, 2, 3), 8, (0, 1, 1, 0)),
        ((0, 1), 7, (2, 0)),
        (LOOPED, 8, (0, 1, 1, 0)),
        (IN_V, 6, (0, 0, 1, 1, 0, 0)),
        ((0, 0, 0, 1), 6, (0, 1, 1, 0)),
    ],
)
def test_no_split_is_better(
    seed: int, kind: type[Loads], stage_to_rank: Split, n_layers: int, least: Split
) -> None:
    load = kind(seed, stage_to_rank, n_layers)
    found = split_of(n_layers, stage_to_rank, load, least)
    assert sum(found) == n_layers
    assert all(n >= m for n, m in zip(found, least, strict=True))
    assert load.order(found) == min(map(load.order, all_splits(n_layers, least)))


class UnlikeLoads(Loads):
    """Each layer weighs what it weighs, wherever it is; a rank's last stage has 4 more."""

    def __init__(self, seed: int, stage_to_rank: Sequence[int], n_layers: int) -> None:
        super().__init__(seed, stage_to_rank, n_layers)
        self.weights = [random.Random(seed + n).choice([0, 1, 2, 7]) for n in range(n_layers)]

    def __call__(self, rank: int, spans: Sequence[Span]) -> list[int]:
        ((start, stop),) = spans
        return [sum(self.weights[start:stop]), 4 * (rank == len(self.stages) - 1)]


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize(
    ("n_layers", "least"),
    [(9, (0, 1, 0)), (8, (0, 1, 1, 0)), (8, (2, 1, 1, 1)), (7, (0, 0)), (6, (0, 1, 1, 1, 0))],
)
def test_no_split_of_layers_that_differ_is_better(seed: int, n_layers: int, least: Split) -> None:
    load = UnlikeLoads(seed, range(len(least)), n_layers)
    found = split_of(n_layers, range(len(least)), load, least, are_alike=False)
    # Of equals the one with more layers in front.
    every = list(all_splits(n_layers, least))
    assert found == min(every, key=lambda split: (load.order(split), [-n for n in split]))


def weigh_alike(_: int, spans: Sequence[Span]) -> list[int]:
    return [stop - start for start, stop in spans]


def test_what_is_left_over_goes_to_the_front() -> None:
    for are_alike in (True, False):
        found = split_of(10, (0, 1, 2, 3), weigh_alike, (0, 1, 1, 0), are_alike=are_alike)
        assert found == (3, 3, 2, 2)
    assert split_of(10, LOOPED, weigh_alike, (0, 1, 1, 0)) == (3, 3, 2, 2)


def test_of_the_same_largest_load_the_most_even_split_is_taken() -> None:
    """The last stage has 9 with nothing; whatever the others have, up to 9, is no larger."""

    def heavy_end(rank: int, spans: Sequence[Span]) -> list[int]:
        return [*weigh_alike(rank, spans), 9 if rank == 3 else 0]

    assert split_of(12, (0, 1, 2, 3), heavy_end, (0, 1, 1, 0)) == (4, 4, 4, 0)


def test_a_rank_has_its_stages_front_to_back() -> None:
    assert stages_of_ranks(IN_V) == [(0, 5), (1, 4), (2, 3)]


def test_what_cannot_be_split_is_said() -> None:
    with pytest.raises(ValueError, match="3 layers are too few for 5 stages"):
        split_of(3, range(5), weigh_alike, (0, 2, 1, 1, 0))
    with pytest.raises(ValueError, match=r"a rank has 5 stages; .* for up to 4"):
        split_of(9, (0,) * 5, weigh_alike, (0,) * 5)
    with pytest.raises(ValueError, match="a rank has 2 stages, and the layers of the model differ"):
        split_of(9, LOOPED, weigh_alike, (0, 1, 1, 0), are_alike=False)


def test_large_pipelines_take_a_moment() -> None:
    """126 layers over 64 ranks; ends that weigh as three layers each."""

    def load(rank: int, spans: Sequence[Span]) -> list[int]:
        return [*weigh_alike(rank, spans), 3 * (rank in (0, 63))]

    split = split_of(126, range(64), load, (0, *[1] * 62, 0))
    assert max(split) == 3
    assert split[-1] == 0


EACH = (0, 1, 2, 3)
MS = 1_000_000


def test_a_stage_works_forward_and_backward() -> None:
    # By hand: 6 ms a layer, 2 ms of the embedding, 18 ms of head and loss.
    assert time_load(TIMES, EACH).of_split((3, 3, 3, 3)) == [
        20 * MS, 18 * MS, 18 * MS, 36 * MS,
    ]  # fmt: skip
    assert min_max_split(12, time_load(TIMES, EACH)) == (3, 4, 4, 1)


def test_a_rank_works_on_all_its_stages() -> None:
    looped = (0, 1, 0, 1)
    load = time_load(TIMES, looped)
    assert load.of_rank(0, [(0, 3), (6, 10)]) == [20 * MS, 24 * MS]
    assert load.of_split((3, 3, 4, 2)) == [44 * MS, 48 * MS]
    # 2 + 6 n against 18 + 6 n: even with 7 and 5 layers, the last stage with as few as it can.
    split = min_max_split(12, load)
    assert (split[0] + split[2], split[1] + split[3]) == (7, 5)


def test_parameters_are_those_of_layers_and_ends() -> None:
    load = parameter_load(PartParameters(first=50, layers=(10,) * 16, last=50), EACH)
    assert load.of_split((2, 6, 6, 2)) == [70, 60, 60, 70]
    assert min_max_split(16, load) == (2, 6, 6, 2)


def test_parameters_of_layers_that_differ_count_where_they_are() -> None:
    load = parameter_load(PartParameters(first=5, layers=(1, 1, 8, 8, 64), last=6), (0, 1, 2))
    assert load.of_split((2, 2, 1)) == [7, 16, 70]
    # Nothing is less than the last layer, so it is alone and the head behind it.
    assert min_max_split(5, load) == (4, 1, 0)


@pytest.mark.parametrize(
    "order",
    [
        gpipe_order(3, 4),
        one_f_one_b_order(3, 6),
        parse_order(["0F0 3F0 3I0 3W0 0I0 0W0", "1F0 2F0 2I0 1I0 2W0 1W0"]),
    ],
    ids=["gpipe", "1f1b", "v"],
)
def test_the_fullest_rank_holds_as_little_as_can_be(order: ScheduleOrder) -> None:
    least = (0, *[1] * (order.n_stages - 2), 0)

    def fullest(split: Split) -> int:
        return max(
            rank_memory(
                BYTES,
                {a.stage: parts_of(a.stage, len(split), split[a.stage]) for a in row},
                row,
                order,
            ).total
            for row in order.ranks
        )

    load = memory_load(BYTES, order)
    split = min_max_split(9, load)
    assert fullest(split) == min(map(fullest, all_splits(9, least)))
    assert max(load.of_split(split)) == fullest(split)
