"""What the clocks of one rank saw of one pipeline batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from timelyfreeze.schedule import Action


@dataclass(frozen=True)
class BatchRecord:
    """What one rank did in one pass (one pipeline batch).

    Attributes:
        durations_ms: Milliseconds of each action, float64, in the order of execution.
        span_ms: Milliseconds from the start of the rank's first action to the end of its last,
            waiting included.
        intervals_ms: When each action began and ended, in milliseconds since the rank's first
            action began; longer than its duration where the rank went without a core.
    """

    durations_ms: dict[Action, float]
    span_ms: float
    intervals_ms: dict[Action, tuple[float, float]] = field(default_factory=dict)
