import time
from dataclasses import replace

import pytest
import torch

from timelyfreeze.runtime.recorder import (
    ActionRecorder,
    CudaClock,
    HostClock,
    LoneHostClock,
    SharedHostClock,
    clock_for,
)
from timelyfreeze.schedule.order import parse_action
from timelyfreeze.timing.monitoring import BatchRecord

F0, B0, F1 = map(parse_action, ("0F0", "0B0", "0F1"))


class HandClock:
    """Stands still until it is moved; knows which marks were waited for."""

    def __init__(self, gaps_are_work: bool = False) -> None:
        self.gaps_are_work = gaps_are_work
        self.now_ms = 0.0
        self.waited_for: list[float] = []

    def pass_by(self, ms: float) -> None:
        self.now_ms += ms

    def mark(self) -> float:
        return self.now_ms

    def wait(self, mark: float) -> None:
        self.waited_for.append(mark)

    def work_ms(self, start: float, end: float) -> float:
        return end - start

    def elapsed_ms(self, start: float, end: float) -> float:
        return end - start


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def recorder(clock: HandClock) -> ActionRecorder:
    return ActionRecorder(clock)


def record(recorder: ActionRecorder, clock: HandClock, *blocks: tuple[object, float]) -> None:
    """Run blocks of (action or None for waiting, milliseconds) as one pass."""
    with recorder.recorded_batch():
        for action, ms in blocks:
            if action is None:
                clock.pass_by(ms)
                continue
            with recorder.measure(action):
                clock.pass_by(ms)


def times_of(recorder: ActionRecorder) -> list[BatchRecord]:
    """What was recorded, without the intervals."""
    return [replace(passed, intervals_ms={}) for passed in recorder.drain()]


def test_intervals_begin_with_the_first_action_and_have_the_gaps_between_them() -> None:
    for gaps_are_work in (False, True):
        clock = HandClock(gaps_are_work=gaps_are_work)
        recorder = ActionRecorder(clock)
        record(recorder, clock, (None, 100.0), (F0, 2.0), (None, 5.0), (B0, 4.0), (None, 50.0))
        (passed,) = recorder.drain()
        assert passed.intervals_ms == {F0: (0.0, 2.0), B0: (7.0, 11.0)}


def test_an_action_of_several_blocks_lasts_from_the_first_to_the_last(recorder, clock) -> None:
    record(recorder, clock, (F0, 1.0), (None, 3.0), (F0, 2.0), (B0, 4.0))
    (passed,) = recorder.drain()
    assert passed.intervals_ms == {F0: (0.0, 6.0), B0: (6.0, 10.0)}


def test_waiting_between_actions_counts_for_the_span_alone(recorder, clock) -> None:
    record(recorder, clock, (None, 100.0), (F0, 2.0), (None, 5.0), (B0, 4.0), (None, 50.0))
    assert times_of(recorder) == [BatchRecord({F0: 2.0, B0: 4.0}, span_ms=11.0)]


def test_gaps_go_to_the_action_that_follows_where_they_are_work() -> None:
    clock = HandClock(gaps_are_work=True)
    recorder = ActionRecorder(clock)
    record(recorder, clock, (None, 100.0), (F0, 2.0), (None, 5.0), (B0, 4.0), (None, 50.0))
    assert times_of(recorder) == [BatchRecord({F0: 2.0, B0: 9.0}, span_ms=11.0)]


def test_blocks_of_one_action_add_up_in_the_place_of_the_first(recorder, clock) -> None:
    record(recorder, clock, (F0, 1.0), (F1, 8.0), (F0, 2.0), (B0, 4.0))
    (passed,) = recorder.drain()
    assert list(passed.durations_ms.items()) == [(F0, 3.0), (F1, 8.0), (B0, 4.0)]


def test_the_loss_is_part_of_the_action_before_it(recorder, clock) -> None:
    with recorder.recorded_batch():
        with recorder.measure(F0):
            clock.pass_by(1.0)
        with recorder.measure_more():
            clock.pass_by(2.0)
        with recorder.measure(B0):
            clock.pass_by(4.0)
    assert times_of(recorder) == [BatchRecord({F0: 3.0, B0: 4.0}, span_ms=7.0)]


def test_nothing_is_recorded_outside_a_pass(recorder, clock) -> None:
    with recorder.measure(F0):
        clock.pass_by(1.0)
    with recorder.measure_more():
        clock.pass_by(1.0)
    assert recorder.drain() == []
    record(recorder, clock, (B0, 4.0))
    with recorder.measure(F1):
        clock.pass_by(1.0)
    assert times_of(recorder) == [BatchRecord({B0: 4.0}, span_ms=4.0)]


def test_a_loss_before_any_action_is_not_recorded(recorder, clock) -> None:
    with recorder.recorded_batch():
        with recorder.measure_more():
            clock.pass_by(2.0)
        with recorder.measure(F0):
            clock.pass_by(1.0)
    assert times_of(recorder) == [BatchRecord({F0: 1.0}, span_ms=1.0)]


def test_a_pass_that_raises_is_discarded_and_the_next_one_is_whole(recorder, clock) -> None:
    def fail() -> None:
        with recorder.recorded_batch():
            with recorder.measure(F0):
                clock.pass_by(1.0)
            with recorder.measure(B0):
                raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    record(recorder, clock, (F1, 3.0))
    assert times_of(recorder) == [BatchRecord({F1: 3.0}, span_ms=3.0)]


def test_a_pass_without_actions_is_none(recorder, clock) -> None:
    record(recorder, clock, (None, 5.0))
    assert recorder.drain() == []


def test_passes_come_out_once_oldest_first_after_one_wait_for_the_last_mark(
    recorder, clock
) -> None:
    record(recorder, clock, (F0, 1.0), (B0, 2.0))
    record(recorder, clock, (None, 3.0), (B0, 4.0), (F0, 5.0))
    assert clock.waited_for == [], "recording must not wait for the device"
    first, second = recorder.drain()
    assert list(first.durations_ms) == [F0, B0]
    assert list(second.durations_ms) == [B0, F0]
    assert clock.waited_for == [15.0]
    assert recorder.drain() == []
    assert clock.waited_for == [15.0]


@pytest.mark.parametrize("clock_class", [HostClock, SharedHostClock])
def test_sleeping_is_no_work_on_a_shared_core(clock_class) -> None:
    clock = clock_class()
    start = clock.mark()
    time.sleep(0.05)
    end = clock.mark()
    clock.wait(end)
    assert clock.elapsed_ms(start, end) >= 50.0
    if clock_class is HostClock:
        assert clock.work_ms(start, end) == clock.elapsed_ms(start, end)
    else:
        assert clock.work_ms(start, end) < clock.elapsed_ms(start, end)


def test_the_clock_fits_the_device() -> None:
    assert type(clock_for(torch.device("cpu"))) is HostClock
    assert type(clock_for(torch.device("cpu"), shared=True)) is SharedHostClock
    assert type(clock_for(torch.device("cpu"), lone=True)) is LoneHostClock
    assert type(clock_for(torch.device("cuda"), lone=True)) is CudaClock
    assert type(clock_for(torch.device("cuda"))) is CudaClock
    assert type(clock_for(torch.device("cuda"), shared=True)) is CudaClock


def test_one_thread_for_all_ranks_counts_its_own_work_and_no_gaps() -> None:
    recorder = ActionRecorder(LoneHostClock())
    with recorder.recorded_batch():
        with recorder.measure(F0):
            time.sleep(0.02)
        _work_for(0.02)
        with recorder.measure(F1):
            _work_for(0.005)
    (found,) = recorder.drain()
    # Neither sleep nor what lies between is work of F0; of F1 only its own 5 ms are.
    assert found.durations_ms[F0] < 10.0
    assert 5.0 <= found.durations_ms[F1] < 20.0
    assert 25.0 <= found.span_ms < 45.0, "sleep is no part of the span either"


def _work_for(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        sum(range(1000))
