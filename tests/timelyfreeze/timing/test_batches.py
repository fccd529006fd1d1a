"""The oracle plays the batch on one clock, then hides that clock from the ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timelyfreeze.helpers.pipelines import BY_HAND, hand_order, random_order, simulate
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import Action, ScheduleOrder, gpipe_order, one_f_one_b_order
from timelyfreeze.settings.phases import Phase
from timelyfreeze.timing.batches import (
    RankBatches,
    batch_times,
    holds_for,
    interval_factor,
    range_of,
    within,
)


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


# 95% quantiles by degrees of freedom, as printed in textbooks.
STUDENT = {2: 2.920, 3: 2.353, 4: 2.132, 6: 1.943, 10: 1.812, 19: 1.729, 39: 1.685}


@pytest.mark.parametrize(("freedom", "quantile"), STUDENT.items())
def test_the_factor_by_hand(freedom: int, quantile: float) -> None:
    n = freedom + 1
    errors = [0.1 if i % 2 else -0.1 for i in range(n)]
    spread = math.sqrt(n * 0.01 / (n - 1) * (1 + math.pi / (2 * n)))
    found = interval_factor([math.exp(error) for error in errors])
    assert found is not None
    assert math.log(found) == pytest.approx(quantile * spread, rel=0.013)


def test_batches_in_a_row_on_one_speed_count_as_fewer() -> None:
    """Blocks of 3: of 11 neighbours 8 are alike and 3 are not; two apart, 4 are and 6 are not."""
    errors = [0.1, 0.1, 0.1, -0.1, -0.1, -0.1] * 2
    r_1 = (8 - 3) / 12
    r_2 = (4 - 6) / 12
    assert r_2 < 0.0
    told = 12 / (1 + 2 * (1 - 1 / 12) * r_1)
    spread = math.sqrt(12 * 0.01 / 11 * (1 + math.pi / (2 * told)))
    found = interval_factor([math.exp(error) for error in errors])
    assert found is not None
    # Between Student's quantiles of 5 and 6 degrees of freedom.
    assert 1.943 * spread < math.log(found) < 2.015 * spread
    assert interval_factor([math.exp(error) for error in errors[::-1]]) == pytest.approx(found)


def test_what_all_batches_are_late_by_is_in_it() -> None:
    late = interval_factor([1.08] * 20)
    assert late is not None
    assert late > 1.08
    assert interval_factor([1.0] * 20) == 1.0


@pytest.mark.parametrize(
    "missed_by",
    [(), (1.0, 1.1), (1.0, 1.1, 0.0), (1.0, math.nan, 1.0), (1.0, math.inf, 1.0),
     (1e300, 1e-300, 1e300)],
)  # fmt: skip
def test_too_few_batches_and_times_that_cannot_be_have_none(missed_by: tuple[float, ...]) -> None:
    assert interval_factor(missed_by) is None
    assert within(None) == "interval unknown, fewer than 3 batches timed"
    assert range_of(100.0, None) == ""


def next_batches_within(n: int, spread: float) -> tuple[float, float]:
    """Part of the draws in which batch n + 1 lies in the interval of n; and the mean factor."""
    rng = np.random.default_rng(n)
    hits, factors = 0, []
    for _ in range(3000):
        times = np.exp(rng.normal(0.0, spread, n + 1))
        predicted = np.median(times[:n])
        factor = interval_factor(list(times[:n] / predicted))
        assert factor is not None
        factors.append(factor)
        hits += 1.0 / factor <= times[n] / predicted <= factor
    return hits / 3000, float(np.mean(factors))


@pytest.mark.parametrize("n", [7, 38])
def test_nine_of_ten_next_batches_lie_in_it(n: int) -> None:
    """0.9 and, as the median is a little nearer to its own batches than to others, not below."""
    hits, wide = next_batches_within(n, 0.1)
    assert 0.89 <= hits <= 0.93
    hits, narrow = next_batches_within(n, 0.02)
    assert 0.89 <= hits <= 0.93
    assert narrow - 1.0 < 0.25 * (wide - 1.0)


def test_the_words() -> None:
    assert within(1.25) == (
        "9 of 10 batches within -20.0% to +25.0% if the machine goes on as measured"
    )
    assert range_of(1000.0, 1.25) == "800.0 to 1,250.0 ms"
    assert holds_for(4, None) == holds_for(4, 4.0) == "a device or core of its own for each rank"
    assert holds_for(4, 2.0) == "4 ranks that share 2 cores"
    assert holds_for(2, 1.0) == "2 ranks that share 1 core"
