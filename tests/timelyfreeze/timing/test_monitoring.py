"""What batches freeze while monitoring, and that both ways of it measure the same."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.timelyfreeze.helpers.pipelines import hand_order, simulate
from tests.timelyfreeze.helpers.ranks import Ranks, linear_ms
from timelyfreeze.planning.solution import RankTimes, SolverChoices, solve_from_times
from timelyfreeze.schedule.order import (
    Action,
    ActionKind,
    ScheduleOrder,
    gpipe_order,
    one_f_one_b_order,
)
from timelyfreeze.settings.phases import MIXED, PASSES_FOR_BOTH, PhaseSchedule
from timelyfreeze.timing.monitoring import (
    FROZEN,
    MIXED_PATTERNS,
    UNFROZEN,
    BatchRecord,
    Monitoring,
    Pattern,
    PatternTimes,
    halves,
    pattern_of,
)

ORDER = one_f_one_b_order(2, 4)
# Warm-up 1-2, mixed monitoring 3-8, ramp 9-12, then stable.
PHASES = PhaseSchedule(2, 8, 12, MIXED)
BACKWARDS = [Action(s, ActionKind.FULL_BACKWARD, m) for s in range(4) for m in range(8)]


def drawn(pattern: Pattern, n_stages: int, n_microbatches: int) -> list[str]:
    """One row for each stage, # where frozen."""
    return [
        "".join(
            "#" if pattern.freezes(Action(s, ActionKind.FULL_BACKWARD, m)) else "."
            for m in range(n_microbatches)
        )
        for s in range(n_stages)
    ]


# -- patterns --------------------------------------------------------------------------------------


def test_patterns_by_hand() -> None:
    patterns = [pattern_of(PHASES.at(step), 0, 8) for step in range(3, 9)]
    assert [drawn(p, 2, 8) for p in patterns if p is not None] == [
        [".#.#.#.#", "#.#.#.#."],
        ["#.#.#.#.", ".#.#.#.#"],
        ["..##..##", "##..##.."],
        ["##..##..", "..##..##"],
        ["....####", "####...."],
        ["####....", "....####"],
    ]
    assert [pattern_of(PHASES.at(step), 0, 8) for step in (1, 2, 9, 13)] == [None] * 4
    # The batches of a step go on where the first one begins.
    assert [pattern_of(PHASES.at(4), n, 8) for n in range(3)] == list(MIXED_PATTERNS[1:4])
    # Fewer microbatches have no room for larger blocks.
    assert [pattern_of(PHASES.at(step), 0, 4) for step in (6, 7)] == [
        MIXED_PATTERNS[3],
        MIXED_PATTERNS[0],
    ]
    assert drawn(MIXED_PATTERNS[0], 3, 1) == [".", "#", "."]


def test_halves_are_patterns_too() -> None:
    phases = PhaseSchedule(2, 6, 10)
    assert [pattern_of(phases.at(step), 1, 8) for step in range(2, 8)] == [
        *(None, UNFROZEN, UNFROZEN, FROZEN, FROZEN, None),
    ]
    assert not any(UNFROZEN.freezes(action) for action in BACKWARDS)
    assert all(FROZEN.freezes(action) for action in BACKWARDS)


@pytest.mark.parametrize("n_microbatches", [1, 2, 3, 8])
@pytest.mark.parametrize("batches_per_step", [1, 2, 3])
def test_every_backward_is_seen_both_ways_in_few_steps(
    n_microbatches: int, batches_per_step: int
) -> None:
    for first in range(3, 9):
        seen: dict[tuple[int, int], set[bool]] = {}
        for step in range(first, first + PASSES_FOR_BOTH):
            for index in range(batches_per_step):
                step_of = PhaseSchedule(2, 50, 60, MIXED).at(step)
                pattern = pattern_of(step_of, index, n_microbatches)
                assert pattern is not None
                rows = drawn(pattern, 4, n_microbatches)
                assert "#" in "".join(rows)
                assert "." in "".join(rows), "every pass learns"
                assert n_microbatches == 1 or all("." in row for row in rows), "in every stage"
                for s, row in enumerate(rows):
                    for m, sign in enumerate(row):
                        seen.setdefault((s, m), set()).add(sign == "#")
        assert all(both == {True, False} for both in seen.values())


def test_a_microbatch_is_the_first_live_one_of_its_stage_in_few_patterns_only() -> None:
    """The first one writes gradients, others add to them: no median may be of first ones alone."""
    for microbatch in range(1, 8):
        live = [drawn(p, 1, 8)[0] for p in MIXED_PATTERNS]
        live = [row for row in live if row[microbatch] == "."]
        firsts = [row for row in live if row.index(".") == microbatch]
        assert 2 * len(firsts) < len(live)


# -- times -----------------------------------------------------------------------------------------


def record(time_ms: float) -> BatchRecord:
    return BatchRecord(dict.fromkeys(BACKWARDS, time_ms), 100.0 * time_ms)


def test_times_go_to_the_bound_that_the_pattern_says() -> None:
    monitoring = Monitoring()
    assert monitoring.is_empty
    monitoring.add(MIXED_PATTERNS[0], record(9.0), is_cold=True)
    monitoring.add(MIXED_PATTERNS[1], record(3.0), is_cold=False)
    monitoring.add(MIXED_PATTERNS[2], record(4.0), is_cold=False)
    monitoring.add(MIXED_PATTERNS[0], record(2.0), is_cold=False)
    unfrozen, frozen = halves(monitoring.times())
    action = BACKWARDS[0]  # stage 0, microbatch 0: live in 0 and 2
    assert (sorted(unfrozen[action]), frozen[action]) == ([2.0, 4.0], [3.0])
    again = Monitoring()
    again.load_plain(monitoring.to_plain())
    assert again.times() == monitoring.times()
    monitoring.clear()
    assert monitoring.is_empty


def test_cold_passes_count_only_where_nothing_else_does() -> None:
    monitoring = Monitoring()
    monitoring.add(UNFROZEN, record(9.0), is_cold=True)
    monitoring.add(MIXED_PATTERNS[0], record(8.0), is_cold=True)
    assert [entry.pattern for entry in monitoring.times()] == [UNFROZEN, MIXED_PATTERNS[0]]
    monitoring.add(MIXED_PATTERNS[1], record(2.0), is_cold=False)
    assert [entry.pattern for entry in monitoring.times()] == [UNFROZEN, MIXED_PATTERNS[1]]


# -- bounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches_per_step", [1, 3])
@pytest.mark.parametrize(
    "order",
    [ORDER, gpipe_order(2, 1), *map(hand_order, ("zero_bubble", "v_shape", "interleaved"))],
    ids=["1F1B", "one microbatch", "zero_bubble", "v_shape", "interleaved"],
)
def test_both_ways_find_what_the_clock_says(order: ScheduleOrder, batches_per_step: int) -> None:
    mixed = Ranks(order, phases=PHASES, batches_per_step=batches_per_step)
    paper = Ranks(order, phases=PhaseSchedule(2, 8, 12), batches_per_step=batches_per_step)
    for ranks in (mixed, paper):
        ranks.run(1, 8)
        for controller in ranks.controllers:
            bounds = controller.active_plan.bounds
            for i, action in enumerate(controller.active_plan.dag.actions):
                assert bounds.max_ms[i] == pytest.approx(linear_ms(action, 0.0))
                assert bounds.min_ms[i] == pytest.approx(linear_ms(action, 1.0))
    ratios = [ranks.controllers[0].plan.ratios for ranks in (mixed, paper)]
    assert ratios[0] == pytest.approx(ratios[1])


def test_every_step_learns_in_every_tensor() -> None:
    ranks = Ranks(ORDER, phases=PHASES, n_replicas=2)
    ranks.run(1, 8)
    for rank, stages in enumerate(ranks.stages):
        for stage in stages:
            given = list(ranks.masks(rank, stage))
            assert given[: 2 * 3] == [{}] * 6
            for masks in given[2 * 3 :]:
                assert all(all(mask) for mask in masks.values()), "whole or not at all"
                assert len(masks) == 2, "half of 4 microbatches"
            assert given == list(ranks.masks(rank % 2, stage)), "replicas freeze the same"
            assert set(ranks.stages[rank][stage].without_input_grads) == {frozenset()}
    metrics = ranks.collect()[0]
    assert metrics.average_freeze_ratio == pytest.approx(0.5 * 6 / 8)
    assert ranks.controllers[0].expected_stage_ratios() == {0: 0.5, 1: 0.5}
    assert ranks.controllers[0].expected_batch_ms() is None, "batches are not alike"


# -- messages --------------------------------------------------------------------------------------


def mixed_rank_times(
    order: ScheduleOrder, duration_ms: Callable[[Action, bool], float], overhead_ms: float
) -> list[RankTimes]:
    """What ranks measure whose receiving actions begin ``overhead_ms`` late; no clock sees it."""
    solution = solve_from_times(
        [
            RankTimes(
                tuple(
                    PatternTimes(p, {a: [duration_ms(a, p is FROZEN)] for a in row})
                    for p in (UNFROZEN, FROZEN)
                )
            )
            for row in order.ranks
        ],
        order,
        SolverChoices(0.5),
    )
    late = dict(zip(solution.dag.actions, solution.dag.receiving, strict=True))
    ranks: list[list[PatternTimes]] = [[] for _ in order.ranks]
    for p in MIXED_PATTERNS:
        own = {a: duration_ms(a, p.freezes(a)) for row in order.ranks for a in row}
        played = simulate(order, lambda a, own=own: own[a] + overhead_ms * late[a])
        for rank, row in enumerate(order.ranks):
            start = played[row[0]][0] + overhead_ms * late[row[0]]
            span_ms = max(played[a][1] for a in row) - start
            ranks[rank].append(PatternTimes(p, {a: [own[a]] for a in row}, (span_ms,) * 3))
    return [RankTimes(tuple(entries)) for entries in ranks]


@pytest.mark.parametrize("overhead_ms", [0.0, 0.25, 2.0])
@pytest.mark.parametrize("name", ["1F1B", "interleaved", "v_shape"])
def test_the_overhead_of_a_message_is_found_in_mixed_batches(name: str, overhead_ms: float) -> None:
    order = ORDER if name == "1F1B" else hand_order(name)

    def duration_ms(action: Action, is_frozen: bool) -> float:
        return linear_ms(action, 1.0 if is_frozen else 0.0)

    ranks = mixed_rank_times(order, duration_ms, overhead_ms)
    bounds = solve_from_times(ranks, order, SolverChoices(0.5)).bounds
    assert bounds.p2p_overhead_ms == pytest.approx(overhead_ms, abs=1e-6)
    # Taken for batches of another pattern, the same times would give another overhead.
    swapped = [
        RankTimes(
            tuple(
                PatternTimes(entry.pattern, entry.times, (9.0 + entry.spans_ms[0],))
                for entry in rank.patterns
            )
        )
        for rank in ranks
    ]
    longer = solve_from_times(swapped, order, SolverChoices(0.5)).bounds
    assert longer.p2p_overhead_ms > overhead_ms + 0.5
    assert np.all(longer.max_ms - longer.min_ms == pytest.approx(bounds.max_ms - bounds.min_ms))


def test_without_a_sample_of_both_bounds_there_is_no_plan() -> None:
    times = {a: [1.0] for row in ORDER.ranks for a in row}
    one = [RankTimes((PatternTimes(MIXED_PATTERNS[0], times),))]
    with pytest.raises(ValueError, match=r"0F1 has no unfrozen sample.*later last_monitor_step"):
        solve_from_times(one, ORDER, SolverChoices(0.5))
