"""Merged orders against what actions need, and the virtual clock against a simulated pipeline."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timelyfreeze.helpers.pipelines import (
    BY_HAND,
    TWO_BY_TWO,
    V_SHAPE,
    hand_order,
    needs,
    random_order,
    simulate,
    split_microbatches,
)
from timelyfreeze.control.emulated import merge_ranks, rank_spans, virtual_batch
from timelyfreeze.runtime.torch_pipelining import named_order
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import (
    Action,
    ActionKind,
    ScheduleError,
    ScheduleOrder,
    gpipe_order,
    one_f_one_b_order,
    parse_action,
    parse_order,
)

seeds = st.integers(0, 10**6)


def durations_of(order: ScheduleOrder, seed: int) -> dict[Action, float]:
    rng = random.Random(seed)
    return {a: rng.choice([0.0, rng.uniform(0.1, 9.0)]) for row in order.ranks for a in row}


def assert_valid(merged: tuple[Action, ...], order: ScheduleOrder) -> None:
    """Every action once, ranks in their own order, and nothing before what it needs."""
    for rank, row in enumerate(order.ranks):
        mine = tuple(a for a in merged if order.stage_to_rank[a.stage] == rank)
        assert mine == row, f"rank {rank}"
    split = split_microbatches(order)
    done: set[Action] = set()
    for action in merged:
        assert done.issuperset(needs(action, split, order.n_stages)), action
        done.add(action)


# -- merged orders ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BY_HAND)
def test_orders_by_hand_are_merged_into_a_valid_one(name: str) -> None:
    order = hand_order(name)
    assert_valid(merge_ranks(order), order)


@given(seed=seeds)
def test_random_orders_are_merged_into_a_valid_one(seed: int) -> None:
    order = random_order(seed)
    assert_valid(merge_ranks(order), order)


@pytest.mark.parametrize(
    ("name", "n_ranks", "n_microbatches"),
    [
        (name, *size)
        for name in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
        for size in itertools.product((2, 4), (8, 16))
    ],
)
def test_schedules_of_torch_are_merged_into_a_valid_one(
    name: str, n_ranks: int, n_microbatches: int
) -> None:
    order = named_order(name, n_ranks, n_microbatches, stages_per_rank=2)
    assert_valid(merge_ranks(order), order)


@pytest.mark.parametrize("make", [gpipe_order, one_f_one_b_order])
def test_large_orders_are_merged_into_a_valid_one(make: object) -> None:
    order = make(8, 32)  # type: ignore[operator]
    assert_valid(merge_ranks(order), order)


@pytest.mark.parametrize(
    ("rows", "merged"),
    [
        # Starts: 0F0 at 0, 0F1 and 1F0 at 1, 1F1 at 2, 1B0 at 3, 0B0 and 1B1 at 5, 0B1 at 7.
        (TWO_BY_TWO, "0F0 0F1 1F0 1F1 1B0 0B0 1B1 0B1"),
        # A full backward takes two: 1B0 from 2 to 4, so 0B0 and 1F1 at 4, 1B1 at 5, 0F2 at 6, 0B1
        # and 1F2 at 7, 1B2 at 8, 0B2 at 10.
        (
            ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"],
            "0F0 0F1 1F0 1B0 0B0 1F1 1B1 0F2 0B1 1F2 1B2 0B2",
        ),
        # All take one: 1I0 at 2, 0I0 and 1F1 at 3, 0F2 and 1I1 at 4, 0W0 and 1W0 at 5, 0I1 and 1F2
        # at 6, 0W1 and 1I2 at 7, 0I2 and 1W1 at 8, 0W2 and 1W2 at 9.
        (
            ["0F0 0F1 0I0 0F2 0W0 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"],
            "0F0 0F1 1F0 1I0 0I0 1F1 0F2 1I1 0W0 1W0 0I1 1F2 0W1 1I2 0I2 1W1 0W2 1W2",
        ),
    ],
    ids=["two by two", "1F1B", "zero bubble"],
)
def test_actions_come_as_they_would_start_with_equal_forwards_and_gradients(
    rows: list[str], merged: str
) -> None:
    assert " ".join(map(str, merge_ranks(parse_order(rows)))) == merged


def test_no_more_microbatches_are_alive_than_in_the_pipeline_at_any_moment() -> None:
    """GPipe's merged order may hold all; that of 1F1B must not, or memory would not be told."""

    def max_alive(order: ScheduleOrder) -> int:
        alive = most = 0
        for action in merge_ranks(order):
            alive += {ActionKind.FORWARD: 1, ActionKind.FULL_BACKWARD: -1}[action.kind]
            most = max(most, alive)
        return most

    assert max_alive(gpipe_order(4, 16)) == 4 * 16
    assert max_alive(one_f_one_b_order(4, 16)) <= 4 + 3 + 2 + 1


def test_a_schedule_that_would_hang_is_not_merged() -> None:
    # Rank 0 waits for microbatch 1's gradient, for which rank 1 waits for its forward.
    order = parse_order(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"])
    with pytest.raises(ScheduleError, match="would hang"):
        merge_ranks(order)


# -- the virtual clock -----------------------------------------------------------------------------


def test_a_pass_by_hand() -> None:
    """Two ranks: rank 1 starts at 3 ms; the batch ends with 0B1, for which 1B1 is waited for."""
    order = parse_order(TWO_BY_TWO)
    times = dict(
        zip(
            map(parse_action, ("0F0", "0F1", "0B0", "0B1", "1F0", "1F1", "1B0", "1B1")),
            (3.0, 4.0, 5.0, 6.0, 1.0, 2.0, 10.0, 20.0),
            strict=True,
        )
    )
    # 1F0 3-4, 0F1 3-7, 1F1 7-9, 1B0 9-19, 0B0 19-24, 1B1 19-39, 0B1 39-45.
    played = virtual_batch(build_dag(order), times)
    assert played.span_ms == 45.0
    assert rank_spans(order, played) == [45.0, 36.0]


def test_a_batch_may_end_on_any_rank() -> None:
    order = hand_order("zero_bubble")
    times = {a: 1.0 for row in order.ranks for a in row}
    times[parse_action("1W2")] = 50.0
    played = virtual_batch(build_dag(order), times)
    first, second = rank_spans(order, played)
    assert second > first
    assert played.span_ms == second + 1.0, "rank 1 begins after one forward"


def test_the_order_in_which_times_are_given_does_not_matter() -> None:
    order = parse_order(V_SHAPE)
    times = durations_of(order, 3)
    backwards = dict(reversed(list(times.items())))
    dag = build_dag(order)
    assert virtual_batch(dag, times) == virtual_batch(dag, backwards)


@given(seed=seeds)
def test_a_pass_takes_what_ranks_with_a_device_each_would_take(seed: int) -> None:
    order = random_order(seed)
    times = durations_of(order, seed)
    played = virtual_batch(build_dag(order), times)
    simulated = simulate(order, times.__getitem__)
    assert played.span_ms == pytest.approx(max(end for _, end in simulated.values()))
    spans = [
        max(simulated[a][1] for a in row) - min(simulated[a][0] for a in row) for row in order.ranks
    ]
    assert rank_spans(order, played) == pytest.approx(spans)


def test_one_rank_has_no_gaps() -> None:
    order = gpipe_order(1, 5)
    times = durations_of(order, 1)
    played = virtual_batch(build_dag(order), times)
    assert played.span_ms == pytest.approx(sum(times.values()))


def test_an_action_without_a_time_is_named() -> None:
    order = parse_order(TWO_BY_TWO)
    times = {a: 1.0 for row in order.ranks for a in row if a.stage == 0}
    with pytest.raises(ValueError, match="4 of 8 actions of the batch have no time: 1F0, 1F1"):
        virtual_batch(build_dag(order), times)


@pytest.mark.parametrize("wrong", [-1.0, np.nan])
def test_times_that_make_no_sense_are_refused(wrong: float) -> None:
    order = parse_order(TWO_BY_TWO)
    times = {a: 1.0 for row in order.ranks for a in row}
    times[parse_action("1B0")] = wrong
    with pytest.raises(ValueError, match="1B0"):
        virtual_batch(build_dag(order), times)
