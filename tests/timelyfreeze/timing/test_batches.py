"""The oracle plays the batch on one clock, then hides that clock from the ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timelyfreeze.helpers.pipelines import BY_HAND, hand_order, random_order, simulate
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import Action, ScheduleOrder, gpipe_order, one_f_one_b_order
from timelyfreeze.settings.phases import Phase
from timelyfreeze.timing.batches import RankBatches, batch_times


def random_durations(order: ScheduleOrder, seed: int) -> dict[Action, float]:
    rng = np.random.default_rng(seed)
    return {action: float(rng.uniform(0.5, 5.0)) for row in order.ranks for action in row}


def batch_and_spans(
    order: ScheduleOrder, durations_ms: dict[Action, float]
) -> tuple[float, list[float]]:
    """Time of the batch, and what each rank's own clock saw of it."""
    times = simulate(order, durations_ms.__getitem__)
    spans = [times[row[-1]][1] - times[row[0]][0] for row in order.ranks]
    return max(end for _, end in times.values()), spans


def own(order: ScheduleOrder, rank: int, durations_ms: dict[Action, float]) -> dict[Action, float]:
    return {action: durations_ms[action] for action in order.ranks[rank]}


@given(seed=st.integers(0, 10**6))
def test_batch_times_are_found_without_a_common_clock(seed: int) -> None:
    order = random_order(seed)
    durations_ms = random_durations(order, seed)
    batch_ms, spans = batch_and_spans(order, durations_ms)
    ranks = [
        RankBatches(((Phase.STABLE.value, span),), own(order, rank, durations_ms))
        for rank, span in enumerate(spans)
    ]
    assert batch_times(build_dag(order), ranks) == {Phase.STABLE: (pytest.approx(batch_ms),)}


@pytest.mark.parametrize("order", [gpipe_order(4, 8), one_f_one_b_order(4, 8)])
def test_each_phase_has_its_own_times_in_order(order: ScheduleOrder) -> None:
    """Backwards differ between phases; the forwards before a rank's first action do not."""
    unfrozen = random_durations(order, 1)
    frozen = {a: ms * (0.3 if a.kind.freezable else 1.0) for a, ms in unfrozen.items()}
    slow, fast = (batch_and_spans(order, each) for each in (unfrozen, frozen))
    assert fast[0] < slow[0]
    batches = [(Phase.UPPER_BOUND, slow), (Phase.LOWER_BOUND, fast), (Phase.UPPER_BOUND, slow)]
    ranks = [
        RankBatches(
            tuple((phase.value, spans[rank]) for phase, (_, spans) in batches),
            own(order, rank, unfrozen),
        )
        for rank in range(order.n_ranks)
    ]
    assert batch_times(build_dag(order), ranks) == {
        Phase.UPPER_BOUND: (pytest.approx(slow[0]), pytest.approx(slow[0])),
        Phase.LOWER_BOUND: (pytest.approx(fast[0]),),
    }


def test_the_rank_that_ends_last_ends_the_batch() -> None:
    order = hand_order("two_by_two")
    ranks = [
        RankBatches(
            (("stable", 7.0),), own(order, 0, dict.fromkeys(build_dag(order).actions, 1.0))
        ),
        RankBatches(
            (("stable", 9.0),), own(order, 1, dict.fromkeys(build_dag(order).actions, 1.0))
        ),
    ]
    # Rank 1 starts after 0F0, which lasts 1 ms.
    assert batch_times(build_dag(order), ranks) == {Phase.STABLE: (10.0,)}


@pytest.mark.parametrize("name", BY_HAND)
def test_of_two_replicas_the_slower_one_counts(name: str) -> None:
    order = hand_order(name)
    quick, slow = random_durations(order, 2), random_durations(order, 2)
    for action in order.ranks[0]:
        slow[action] += 2.0
    ranks = []
    for durations_ms in (slow, quick):
        _, spans = batch_and_spans(order, durations_ms)
        ranks += [
            RankBatches((("ramp", span),), own(order, rank, durations_ms))
            for rank, span in enumerate(spans)
        ]
    wanted = pytest.approx(batch_and_spans(order, slow)[0])
    assert batch_times(build_dag(order), ranks) == {Phase.RAMP: (wanted,)}
    assert batch_times(build_dag(order), ranks[::-1]) == {Phase.RAMP: (wanted,)}


@pytest.mark.parametrize("slow_first", [True, False])
def test_a_batch_waits_for_the_slower_replicas_first_forward(slow_first: bool) -> None:
    order = hand_order("two_by_two")
    ranks = []
    for forward_ms in (3.0, 1.0) if slow_first else (1.0, 3.0):
        durations_ms = dict.fromkeys(build_dag(order).actions, forward_ms)
        ranks += [
            RankBatches((("ramp", span),), own(order, rank, durations_ms))
            for rank, span in enumerate((4.0, 20.0))
        ]
    assert batch_times(build_dag(order), ranks) == {Phase.RAMP: (23.0,)}


def test_only_passes_that_every_rank_has_count() -> None:
    dag = build_dag(hand_order("two_by_two"))
    many = RankBatches((("ramp", 1.0), ("ramp", 2.0)), {})
    assert batch_times(dag, [many, RankBatches((("ramp", 5.0),), {})]) == {Phase.RAMP: (5.0,)}
    assert batch_times(dag, [many, RankBatches((), {})]) == {}
    assert batch_times(dag, []) == {}
