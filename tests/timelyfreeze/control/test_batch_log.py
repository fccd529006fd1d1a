"""Batches by hand: what is told of them, once, and what is left out."""

import logging
import math

import pytest

from tests.timelyfreeze.runtime.test_recorder import B0, F0, HandClock, record
from timelyfreeze.control.collected import BatchLog, ObservedBatch
from timelyfreeze.runtime.recorder import ActionRecorder
from timelyfreeze.settings.phases import Phase, Step
from timelyfreeze.timing.monitoring import FROZEN, Pattern


class Log:
    """A log of one stage, with a clock that is moved by hand."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.recorder = ActionRecorder(self.clock)
        self.log = BatchLog(self.recorder, rank=3, discard_batches=0)

    def run(
        self,
        backward_ms: float,
        *,
        phase: Phase = Phase.STABLE,
        fraction: float = 0.0,
        is_cold: bool = False,
        pattern: Pattern | None = None,
    ) -> None:
        record(self.recorder, self.clock, (F0, 1.0), (B0, backward_ms))
        batch = ObservedBatch(7, phase, is_cold, pattern=pattern)
        self.log.add(batch, {0: {0: fraction}}, {0: ()})


def test_what_is_read_is_told_once_and_without_cold_passes() -> None:
    log = Log()
    for backward_ms in (9.0, 2.0, 4.0, 3.0):
        log.run(backward_ms, fraction=0.25, is_cold=backward_ms == 9.0)
    read = log.log.drain()
    assert [observed.record.durations_ms[B0] for observed in read] == [9.0, 2.0, 4.0, 3.0]
    assert [observed.is_cold for observed in read] == [True, False, False, False]
    assert read[0].fractions == {B0: 0.25}
    assert log.log.drain() == []
    told = log.log.collect(None)["log"]
    assert told.batches.batches == (("stable", 3.0), ("stable", 5.0), ("stable", 4.0))
    assert told.batches.durations_ms == {F0: 1.0, B0: 3.0}
    assert told.under_plan_ms == {F0: 1.0, B0: 3.0}
    assert log.log.collect(None)["log"].batches.batches == ()


def test_shares_are_those_of_the_step() -> None:
    log = Log()
    for fractions in ((0.0, 0.5), (1.0,)):
        log.log.begin_step(Step())
        for fraction in fractions:
            log.run(1.0, fraction=fraction)
    assert log.log.collect(None)["log"].applied_stage_ratios == {0: 1.0}


def test_under_another_plan_stable_passes_are_forgotten() -> None:
    log = Log()
    log.run(2.0, phase=Phase.RAMP)
    log.run(3.0)
    log.log.drain()
    log.log.begin_plan()
    assert log.log.collect(None)["log"].batches.batches == (("ramp", 3.0),)


def test_a_time_that_cannot_be_is_told_once_and_not_while_monitoring(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = Log()
    with caplog.at_level(logging.WARNING):
        log.run(math.nan, phase=Phase.LOWER_BOUND, pattern=FROZEN)
        log.log.drain()
        assert not caplog.records, "the plan that fails by it tells of it"
        log.clock.now_ms = 0.0
        for _ in range(2):
            log.run(-5.0)
            log.log.drain()
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("Rank 3: a clock misread in step 7: 0B0 took -5 ms")
