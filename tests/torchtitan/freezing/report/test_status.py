import pytest

from timelyfreeze.settings.phases import Phase
from torchtitan.freezing.report.status import Pace, Status, duration_text, status_text


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (Status(), ""),
        (Status(loss=2.5), "loss 2.500"),
        (Status(Phase.WARMUP, 9), "warming up (9 more steps)"),
        (Status(Phase.LOWER_BOUND, 1), "measuring, all frozen (1 more step)"),
        (Status(Phase.RAMP, 0), "freezing more and more (last step)"),
        (
            Status(Phase.STABLE, None, 2.0, 1234.5, 0.523, 70.0),
            "freezing, loss 2.000, 1,234 tokens/s, +52% throughput, 1 min 10 s left",
        ),
        (Status(Phase.OFF, gain=-0.014), "freezing is off, -1% throughput"),
    ],
)
def test_what_is_known_is_told_in_words(status: Status, text: str) -> None:
    assert status_text(status) == text


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_has_words(phase: Phase) -> None:
    assert status_text(Status(phase))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (3599.0, "59 min 59 s"),
     (7322.0, "2 h 2 min"), (360000.0, "100 h 0 min")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_the_time_left_follows_the_last_twenty_steps() -> None:
    pace = Pace(100)
    assert pace.add(Status(loss=1.0), 1, 2.0) == Status(loss=1.0, seconds_left=198.0)
    assert pace.add(Status(), 2, 4.0).seconds_left == 3.0 * 98
    for step in range(3, 23):
        status = pace.add(Status(), step, 1.0)
    assert status.seconds_left == 78.0
