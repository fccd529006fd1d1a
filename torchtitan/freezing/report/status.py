"""What a person wants to know of a run while it trains, in one line."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from timelyfreeze.settings import Phase

_WORDS = {
    Phase.WARMUP: "warming up",
    Phase.UPPER_BOUND: "measuring, nothing frozen",
    Phase.LOWER_BOUND: "measuring, all frozen",
    Phase.MIXED: "measuring",
    Phase.RAMP: "freezing more and more",
    Phase.STABLE: "freezing",
    Phase.OFF: "freezing is off",
}
# Steps that the time left is reckoned from.
_WINDOW = 20


@dataclass(frozen=True)
class Status:
    """Where a run is; None for what is not known.

    Attributes:
        phase: Phase of the step; None without freezing.
        steps_left_in_phase: None where the phase lasts to the end.
        loss: Logged last.
        tokens_per_second: Per device, since the loss before.
        gain: Throughput over that without freezing, as a fraction.
        seconds_left: Until the last step, at the pace of the last steps.
    """

    phase: Phase | None = None
    steps_left_in_phase: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    gain: float | None = None
    seconds_left: float | None = None


def status_text(status: Status) -> str:
    """Return the status in words, the most important first; unknown things are left out."""
    parts = []
    if status.phase is not None:
        parts.append(_WORDS[status.phase] + _steps_left(status.steps_left_in_phase))
    if status.loss is not None:
        parts.append(f"loss {status.loss:.3f}")
    if status.tokens_per_second is not None:
        parts.append(f"{status.tokens_per_second:,.0f} tokens/s")
    if status.gain is not None:
        parts.append(f"{status.gain:+.0%} throughput")
    if status.seconds_left is not None:
        parts.append(f"{duration_text(status.seconds_left)} left")
    return ", ".join(parts)


def _steps_left(left: int | None) -> str:
    if left is None:
        return ""
    words = {0: "last step", 1: "1 more step"}
    return f" ({words.get(left, f'{left} more steps')})"


def duration_text(seconds: float) -> str:
    """Return a duration in the two largest units that it has."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60} s"
    return f"{total // 3600} h {total % 3600 // 60} min"


class Pace:
    """Reckons the time that is left from the last steps.

    Args:
        n_steps: Steps of the whole run.
    """

    def __init__(self, n_steps: int) -> None:
        self._n_steps = n_steps
        self._seconds: deque[float] = deque(maxlen=_WINDOW)

    def add(self, status: Status, step: int, seconds: float) -> Status:
        """Return ``status`` with the time left after a step that took ``seconds``."""
        self._seconds.append(seconds)
        mean = sum(self._seconds) / len(self._seconds)
        return replace(status, seconds_left=mean * (self._n_steps - step))
