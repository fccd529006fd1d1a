"""Loads by time, parameters and memory, against sums by hand and a search through all splits."""

import pytest

from tests.timelyfreeze.whatif.stages_by_hand import MODEL as TIMES
from tests.timelyfreeze.whatif.test_partition import all_splits
from tests.timelyfreeze.whatif.test_rank_memory import MODEL as BYTES
from timelyfreeze.schedule.order import ScheduleOrder, gpipe_order, one_f_one_b_order, parse_order
from timelyfreeze.whatif.grid import Split
from timelyfreeze.whatif.loads import (
    PartParameters,
    loads_of_ranks,
    memory_load,
    parameter_load,
    time_load,
)
from timelyfreeze.whatif.partition import min_max_split
from timelyfreeze.whatif.rank_memory import parts_of, rank_memory

EACH = (0, 1, 2, 3)
MS = 1_000_000


def test_a_stage_works_forward_and_backward() -> None:
    # By hand: 6 ms a layer, 2 ms of the embedding, 18 ms of head and loss.
    assert loads_of_ranks(time_load(TIMES, EACH), (3, 3, 3, 3), EACH) == [
        20 * MS, 18 * MS, 18 * MS, 36 * MS,
    ]  # fmt: skip
    assert min_max_split(12, EACH, time_load(TIMES, EACH), (0, 1, 1, 0)) == (3, 4, 4, 1)


def test_a_rank_works_on_all_its_stages() -> None:
    looped = (0, 1, 0, 1)
    load = time_load(TIMES, looped)
    assert load.of_rank(0, [(0, 3), (6, 10)]) == [20 * MS, 24 * MS]
    assert loads_of_ranks(load, (3, 3, 4, 2), looped) == [44 * MS, 48 * MS]
    # 2 + 6 n against 18 + 6 n: even with 7 and 5 layers, the last stage with as few as it can.
    split = min_max_split(12, looped, load, (0, 1, 1, 0))
    assert (split[0] + split[2], split[1] + split[3]) == (7, 5)


def test_parameters_are_those_of_layers_and_ends() -> None:
    load = parameter_load(PartParameters(first=50, layers=(10,) * 16, last=50), EACH)
    assert loads_of_ranks(load, (2, 6, 6, 2), EACH) == [70, 60, 60, 70]
    assert min_max_split(16, EACH, load, (0, 1, 1, 0)) == (2, 6, 6, 2)


def test_parameters_of_layers_that_differ_count_where_they_are() -> None:
    load = parameter_load(PartParameters(first=5, layers=(1, 1, 8, 8, 64), last=6), (0, 1, 2))
    assert loads_of_ranks(load, (2, 2, 1), (0, 1, 2)) == [7, 16, 70]
    # Nothing is less than the last layer, so it is alone and the head behind it.
    assert min_max_split(5, (0, 1, 2), load, (0, 1, 0)) == (4, 1, 0)


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
                n_stages=order.n_stages,
                n_microbatches=order.n_microbatches,
            ).total
            for row in order.ranks
        )

    load = memory_load(BYTES, order)
    split = min_max_split(9, order.stage_to_rank, load, least)
    assert fullest(split) == min(map(fullest, all_splits(9, least)))
    assert max(loads_of_ranks(load, split, order.stage_to_rank)) == fullest(split)
