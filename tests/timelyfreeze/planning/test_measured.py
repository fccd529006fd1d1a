"""Batches in which a rank stood still, replayed on a clock: they are told, and plan nothing."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from tests.timelyfreeze.helpers.pipelines import simulate
from timelyfreeze.planning.measured import RankTimes, bounds_from_times
from timelyfreeze.planning.solution import Solution, SolverChoices, solve_from_times
from timelyfreeze.schedule.order import Action, one_f_one_b_order, parse_action
from timelyfreeze.timing.monitoring import (
    FROZEN,
    MIXED_PATTERNS,
    UNFROZEN,
    Pattern,
    PatternTimes,
)

ORDER = one_f_one_b_order(2, 4)
STALL_MS = 20_000.0
Durations = Mapping[Action, float]


def batch(pattern: Pattern, slowness: float, stalled: str | None) -> tuple[Durations, list[float]]:
    """Return what the clocks of the ranks see of one batch, one of them stopped for 20 s."""
    own = {
        action: slowness * (5.0 if action.kind.freezable and pattern.freezes(action) else 10.0)
        for row in ORDER.ranks
        for action in row
    }
    if stalled not in (None, "waiting"):
        own[parse_action(stalled)] += STALL_MS
    played = simulate(ORDER, own.__getitem__)
    spans = [played[row[-1]][1] - played[row[0]][0] for row in ORDER.ranks]
    return own, [span + STALL_MS * (stalled == "waiting") for span in spans]


def times(pattern: Pattern, stalls: Sequence[str | None]) -> list[PatternTimes]:
    """Return what each rank tells of the batches of one pattern, one for each of ``stalls``."""
    batches = [batch(pattern, 1.0 + 0.02 * (n % 3), stall) for n, stall in enumerate(stalls)]
    return [
        PatternTimes(
            pattern,
            {action: [own[action] for own, _ in batches] for action in row},
            tuple(spans[rank] for _, spans in batches),
        )
        for rank, row in enumerate(ORDER.ranks)
    ]


def monitored(
    patterns: Sequence[tuple[Pattern, Sequence[str | None]]], warmup: Sequence[str | None]
) -> list[RankTimes]:
    by_rank = zip(*(times(*each) for each in patterns), strict=True)
    before = times(UNFROZEN, warmup)
    return [RankTimes(each, warmup=before[rank]) for rank, each in enumerate(by_rank)]


def mixed(stall: str | None, place: int = 2) -> list[RankTimes]:
    """A batch of each mixed pattern, as short runs have."""
    stalls = [stall if n == place else None for n in range(len(MIXED_PATTERNS))]
    patterns = [(p, [s]) for p, s in zip(MIXED_PATTERNS, stalls, strict=True)]
    return monitored(patterns, [None] * 4)


def solved(ranks: list[RankTimes]) -> Solution:
    return solve_from_times(ranks, ORDER, SolverChoices(0.5))


@pytest.mark.parametrize("place", range(len(MIXED_PATTERNS)))
@pytest.mark.parametrize("stall", ["0F1", "1F2", "1B2", "0B3", "waiting"])
def test_a_batch_in_which_a_rank_stood_still_changes_no_plan(
    stall: str, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    quiet, held_up = solved(mixed(None)), solved(mixed(stall, place))
    (told,) = [record.getMessage() for record in caplog.records]
    assert f"Batch 1 of {MIXED_PATTERNS[place].name} took" in told
    assert held_up.bounds.p2p_overhead_ms == pytest.approx(0.0, abs=0.5)
    assert held_up.bounds.interval_factor == pytest.approx(quiet.bounds.interval_factor, rel=0.05)
    for name in ("batch_ms", "unfrozen_batch_ms", "frozen_batch_ms"):
        assert getattr(held_up.plan, name) == pytest.approx(getattr(quiet.plan, name), rel=0.03)


def test_a_stall_of_the_warm_up_widens_no_interval(caplog: pytest.LogCaptureFixture) -> None:
    halves = [(UNFROZEN, [None] * 3), (FROZEN, [None] * 3)]
    _, quiet = bounds_from_times(monitored(halves, [None] * 3), ORDER)
    _, held_up = bounds_from_times(monitored(halves, [None, "0B1", None]), ORDER)
    assert "Batch 2 of warmup" in caplog.text
    assert held_up.interval_factor == pytest.approx(quiet.interval_factor, rel=0.02)


@pytest.mark.parametrize(("half", "other"), [(UNFROZEN, FROZEN), (FROZEN, UNFROZEN)])
def test_of_two_batches_in_a_half_one_may_be_held_up(half: Pattern, other: Pattern) -> None:
    ranks = monitored([(half, [None, "1B0"]), (other, [None, None])], [None] * 4)
    quiet = monitored([(half, [None, None]), (other, [None, None])], [None] * 4)
    assert solved(ranks).plan.batch_ms == pytest.approx(solved(quiet).plan.batch_ms, rel=0.03)


def test_where_nothing_else_was_measured_of_a_half_it_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A short run on a busy machine has no other times, and a plan from these is checked later."""
    ranks = monitored([(UNFROZEN, [None]), (FROZEN, ["0F0"])], [None] * 4)
    assert solved(ranks).plan.batch_ms > 0.0
    assert f"Batch 1 of {FROZEN.name}" in caplog.text
    assert "are kept after all" in caplog.text


def test_a_machine_that_is_uneven_all_the_time_is_measured_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Half of the batches take thrice as long: this is the machine, not a stall."""
    rng = np.random.default_rng(1)

    def scattered(pattern: Pattern, n: int) -> list[PatternTimes]:
        def slower(values: Sequence[float], factors: Sequence[float]) -> list[float]:
            return [value * factor for value, factor in zip(values, factors, strict=True)]

        factors = np.exp(rng.normal(0.0, 0.5, n)).tolist()
        return [
            PatternTimes(
                pattern,
                {action: slower(values, factors) for action, values in rank.times.items()},
                tuple(slower(rank.spans_ms, factors)),
            )
            for rank in times(pattern, [None] * n)
        ]

    halves = zip(scattered(UNFROZEN, 8), scattered(FROZEN, 8), strict=True)
    ranks = [RankTimes(each) for each in halves]
    bounds_from_times(ranks, ORDER)
    assert "held up" not in caplog.text
