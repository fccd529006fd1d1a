import numpy as np

from timelyfreeze.control.collected import ObservedBatch
from timelyfreeze.records.responses import ResponseRow
from timelyfreeze.schedule.actions import parse_action
from timelyfreeze.settings.phases import Phase
from timelyfreeze.timing.samples import BatchRecord
from torchtitan.freezing.report.response_sample import ResponseSample


def observed(step: int, phase: Phase = Phase.STABLE, *, is_cold: bool = False) -> ObservedBatch:
    """A forward and two backwards; the first takes as many milliseconds as the step's number."""
    times = {"1F0": 1.0, "1B0": float(step), "1B1": 0.5}
    durations = {parse_action(text): ms for text, ms in times.items()}
    fractions = {parse_action("1B0"): 0.25, parse_action("1B1"): 0.75}
    record = BatchRecord(durations_ms=durations, intervals_ms={}, span_ms=9.0)
    return ObservedBatch(step, phase, is_cold, record, fractions)


def test_backwards_are_kept_with_what_was_frozen_of_them() -> None:
    sample = ResponseSample()
    sample.add(observed(7))
    sample.add(observed(8, is_cold=True))
    assert sample.by_stage() == {
        1: [
            ResponseRow(1, "B", "stable", 0, 0.25, 7.0),
            ResponseRow(1, "B", "stable", 1, 0.75, 0.5),
        ]
    }


def test_a_long_run_keeps_a_bounded_fair_and_repeatable_sample() -> None:
    def sampled() -> list[ResponseRow]:
        sample = ResponseSample(n_kept=100)
        for step in range(1, 2001):
            sample.add(observed(step))
        sample.add(observed(3, Phase.RAMP))
        return sample.by_stage()[1]

    rows = sampled()
    assert rows == sampled()
    assert [row.phase for row in rows].count("stable") == 100
    assert [row.phase for row in rows].count("ramp") == 2, "phases do not crowd each other out"
    steps = [row.duration_ms for row in rows if row.microbatch == 0 and row.phase == "stable"]
    assert 700 < np.mean(steps) < 1300, "neither the first nor the last only"
