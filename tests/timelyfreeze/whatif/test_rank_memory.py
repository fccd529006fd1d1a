"""What a rank holds, against sums by hand."""

import pytest

from timelyfreeze.schedule.order import parse_order
from timelyfreeze.whatif.rank_memory import (
    RESERVE_BYTES,
    ModelBytes,
    PartBytes,
    RankMemory,
    cut_memory,
    parts_of,
    peak_bytes,
    rank_memory,
)

MODEL = ModelBytes(
    embedding=PartBytes(weights=100, casts=0, kept=1, kept_between_halves=0, largest_weight=100),
    layer=PartBytes(weights=30, casts=15, kept=7, kept_between_halves=3, largest_weight=12),
    norm=PartBytes(weights=2, casts=0, kept=0, kept_between_halves=0, largest_weight=2),
    head=PartBytes(weights=80, casts=40, kept=50, kept_between_halves=20, largest_weight=80),
    message=5,
    logits=11,
    recomputed=4,
    update_copies=0,
)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (["0F0 0F1 0F2 0B0 0B1 0B2"], [30]),
        (["0F0 0B0 0F1 0B1"], [10]),
        (["0F0 0F1 0B0 0F2 0B1 0B2"], [20]),
        # Input backwards keep the activation and add 3 until the weight backward.
        (["0F0 0F1 0I0 0I1 0W0 0W1"], [26]),
        (["0F0 0I0 0W0 0F1 0I1 0W1"], [13]),
        # Stage 1 weighs 11.
        (["0F0 1F0 1B0 0B0"], [21]),
    ],
)
def test_the_fullest_moment_by_hand(rows: list[str], expected: list[int]) -> None:
    order = parse_order(rows)
    found = [peak_bytes(row, lambda s: 10 + s, lambda s: 3 + s) for row in order.ranks]
    assert found == expected


def test_parts_of_stages() -> None:
    assert parts_of(0, 3, 4) == {"embedding": 1, "layer": 4}
    assert parts_of(1, 3, 4) == {"layer": 4}
    assert parts_of(2, 3, 0) == {"layer": 0, "norm": 1, "head": 1}


def test_the_ranks_of_a_pipeline_by_hand() -> None:
    order = parse_order(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])
    first, last = (
        rank_memory(MODEL, {s: parts_of(s, 2, 2)}, order.ranks[s], order) for s in (0, 1)
    )
    # 160 of weights; two forwards of 1 + 2 * 7 and the message; a neighbour, two microbatches.
    assert first == RankMemory(160, 160, 320, 30, 2 * (15 + 5), 10, 100 + 4)
    # 142 of weights; one forward of 2 * 7 + 50; the logits and their gradient.
    assert last == RankMemory(142, 142, 284, 70, 64, 10, 80 + 22 + 4)


def test_a_rank_with_two_stages_has_both() -> None:
    order = parse_order(["0F0 1F0 1I0 1W0 0I0 0W0"])
    stages = {0: parts_of(0, 2, 1), 1: parts_of(1, 2, 0)}
    found = rank_memory(MODEL, stages, order.ranks[0], order)
    # Fullest after 1I0: 1 + 7 + 5 of stage 0, 50 and 20 of the head.
    assert found.activations == 83
    assert (found.parameters, found.messages, found.scratch) == (212, 10, 100 + 22 + 4)


def test_an_update_of_all_weights_at_once_copies_the_larger_stage() -> None:
    order = parse_order(["0F0 1F0 1B0 0B0"])
    stages = {0: parts_of(0, 2, 1), 1: parts_of(1, 2, 0)}

    def scratch(copies: int) -> int:
        model = ModelBytes(**{**vars(MODEL), "update_copies": copies})
        return rank_memory(model, stages, order.ranks[0], order).scratch

    assert scratch(1) - scratch(0) == 130


def test_of_frozen_parts_there_are_the_weights_and_their_moments() -> None:
    order = parse_order(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])

    def memory(n_frozen: int) -> RankMemory:
        return cut_memory(MODEL, order, 0, 0, 2, n_frozen)

    assert memory(0) == rank_memory(MODEL, {0: parts_of(0, 2, 2)}, order.ranks[0], order)
    # 130 of 160 frozen: gradients of 30, two forwards of 7 and the message. While a frozen layer
    # runs it has its 7, more than the 4 of one that runs again.
    assert memory(1) == RankMemory(160, 30, 320, 30, 2 * (7 + 5), 10, 12 + 7)
    # Frozen whole, it keeps nothing for a backward, not its message either.
    assert memory(2) == RankMemory(160, 0, 320, 30, 0, 10, 7)
    # Layers 2 and 3 are on the other rank.
    assert memory(4) == memory(2)


def test_a_reserve_is_kept_back() -> None:
    memory = RankMemory(10, 10, 15, 5, 5, 3, 2)
    assert memory.total == 50
    assert memory.fits(50 + RESERVE_BYTES)
    assert not memory.fits(49 + RESERVE_BYTES)
