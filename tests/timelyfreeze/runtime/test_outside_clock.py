"""Time beside batches, by a clock that is moved by hand."""

from __future__ import annotations

import pytest

from tests.timelyfreeze.helpers.ranks import HandClock
from timelyfreeze.runtime import OutsideClock
from timelyfreeze.settings import Phase, Step


def spent(outside: OutsideClock, clock: HandClock, *gaps_ms: float) -> float | None:
    """End a step of batches of 100 ms with these gaps before, between and after them."""
    for gap_ms in gaps_ms[:-1]:
        clock.now_ms += gap_ms
        with outside.batch():
            clock.now_ms += 100.0
        outside.end_batch(0, {})
    clock.now_ms += gaps_ms[-1]
    return ended(outside)


def ended(outside: OutsideClock) -> float | None:
    """End a step; return its time per batch, None where it is not timed."""
    kept: list[float] = []
    outside.keep = kept.append
    outside.end_step(TIMED)
    return kept[0] if kept else None


TIMED, UNTIMED = Step(3, Phase.UPPER_BOUND), Step(5, Phase.LOWER_BOUND)


def test_what_lies_before_between_and_after_batches_adds_up() -> None:
    clock = HandClock()
    outside = OutsideClock(clock)
    outside.begin_step(TIMED)
    assert spent(outside, clock, 3.0, 0.5, 8.0) == 11.5 / 2
    clock.now_ms += 1000.0  # a validation between two steps
    outside.begin_step(TIMED)
    assert spent(outside, clock, 1.0, 2.0) == 3.0


def test_steps_that_freeze_are_not_timed() -> None:
    clock = HandClock()
    outside = OutsideClock(clock)
    assert spent(outside, clock, 3.0, 4.0) is None, "nobody began it"
    outside.begin_step(TIMED)
    assert spent(outside, clock, 1.0, 1.0) == 2.0
    outside.begin_step(UNTIMED)
    assert spent(outside, clock, 3.0, 4.0) is None


def test_a_batch_that_fails_is_no_part_either() -> None:
    clock = HandClock()
    outside = OutsideClock(clock)
    outside.begin_step(TIMED)

    def fail() -> None:
        with outside.batch():
            clock.now_ms += 50.0
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert spent(outside, clock, 1.0, 4.0) == 5.0


def test_what_other_ranks_made_it_wait_is_left_out() -> None:
    clock = HandClock()
    waits = iter([6.0, 50.0])
    outside = OutsideClock(clock, lambda: next(waits))
    outside.begin_step(TIMED)
    assert spent(outside, clock, 1.0, 9.0) == 4.0
    outside.begin_step(TIMED)
    assert spent(outside, clock, 1.0, 9.0) == 0.0


def test_a_block_within_a_batch_counts() -> None:
    """Gradients are reduced over replicas in a batch, and no action of the plan has that time."""
    clock = HandClock()
    outside = OutsideClock(clock)
    outside.begin_step(TIMED)
    for _ in range(2):
        clock.now_ms += 1.0
        with outside.batch():
            clock.now_ms += 100.0
            with outside.batch():
                clock.now_ms += 20.0
            clock.now_ms += 100.0
        outside.end_batch(0, {})
    assert ended(outside) == 1.0 + 20.0
