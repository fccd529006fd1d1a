"""Batches of two emulated ranks, timed by a clock that a test moves by hand."""

import pytest

from tests.timelyfreeze.helpers.pipelines import TWO_BY_TWO
from tests.timelyfreeze.helpers.ranks import HandClock
from timelyfreeze.control.emulated import EmulatedBatch, EmulatedRecorder, merge_ranks
from timelyfreeze.schedule.order import Action, parse_order

ORDER = parse_order(TWO_BY_TWO)


def run_batch(recorder: EmulatedRecorder, clock: HandClock, work_ms: float, gap_ms: float) -> None:
    with recorder.recorded_batch():
        for action in merge_ranks(ORDER):
            clock.now_ms += gap_ms
            with recorder.measure(action):
                clock.now_ms += work_ms


def test_a_record_lasts_as_on_two_devices_and_the_pass_as_on_one() -> None:
    clock = HandClock()
    recorder = EmulatedRecorder(clock, ORDER)
    run_batch(recorder, clock, work_ms=10.0, gap_ms=1.0)
    (record,) = recorder.drain()
    # F F on rank 0, then 1F1 1B0 1B1 on rank 1 while rank 0 waits, then 0B1.
    assert record.span_ms == 60.0
    assert set(record.durations_ms.values()) == {10.0}
    assert recorder.take_batches() == [EmulatedBatch(60.0, 8 * 10.0 + 7 * 1.0)]


def test_actions_are_reported_in_the_order_in_which_they_ran() -> None:
    clock = HandClock()
    recorder = EmulatedRecorder(clock, ORDER)
    run_batch(recorder, clock, 1.0, 0.0)
    (record,) = recorder.drain()
    assert tuple(record.durations_ms) == merge_ranks(ORDER)


def test_batches_are_handed_out_once_and_oldest_first() -> None:
    clock = HandClock()
    recorder = EmulatedRecorder(clock, ORDER)
    for work_ms in (1.0, 2.0):
        run_batch(recorder, clock, work_ms, 0.0)
    assert recorder.take_batches() == [], "nothing has been drained"
    assert len(recorder.drain()) == 2
    run_batch(recorder, clock, 3.0, 0.0)
    recorder.drain()
    assert [batch.virtual_ms for batch in recorder.take_batches()] == [6.0, 12.0, 18.0]
    assert recorder.take_batches() == []


def test_the_loss_belongs_to_the_last_stage() -> None:
    clock = HandClock()
    recorder = EmulatedRecorder(clock, ORDER)
    with recorder.recorded_batch():
        for action in merge_ranks(ORDER):
            with recorder.measure(action):
                clock.now_ms += 1.0
            if str(action) in ("1F0", "1F1"):
                with recorder.measure_more():
                    clock.now_ms += 5.0
    (record,) = recorder.drain()
    times = {str(action): ms for action, ms in record.durations_ms.items()}
    assert {text: ms for text, ms in times.items() if ms != 1.0} == {"1F0": 6.0, "1F1": 6.0}


def test_a_pass_that_lacks_an_action_is_no_batch() -> None:
    clock = HandClock()
    recorder = EmulatedRecorder(clock, ORDER)
    with recorder.recorded_batch(), recorder.measure(Action(0, merge_ranks(ORDER)[0].kind, 0)):
        clock.now_ms += 1.0
    with pytest.raises(ValueError, match="7 of 8 actions"):
        recorder.drain()
