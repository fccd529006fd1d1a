"""What is asked: a grid of schedules, caps, numbers of microbatches and splits."""

from __future__ import annotations

from dataclasses import dataclass

from timelyfreeze.settings import ALL_OR_NOTHING, USE
from timelyfreeze.whatif.splits import Split

DEFAULT_SPLIT = "default"
BEST_SPLIT = "balanced"


@dataclass(frozen=True)
class Grid:
    """What to ask: every combination of the first four.

    Attributes:
        schedules: Names of schedules.
        caps: Values of r_max, in [0, 1].
        microbatches: Numbers of microbatches; a microbatch stays as large as it was measured.
        splits: ``DEFAULT_SPLIT`` (as measured, or TorchTitan's cut where the number of stages is
            another), ``BEST_SPLIT`` (fastest without freezing), or layers of each stage.
        n_ranks: Pipeline ranks.
        first_stage: How the first stage is frozen, one of ``settings.FIRST_STAGE_MODES``.
        skip_input_grads: What is done about backwards that nobody needs, one of ``settings.SKIP_INPUT_GRADS``.
        n_processors: How many ranks compute at once; None if each has a device of its own.
        message_ms: Overhead of a message, added to what the bounds have of it.
        batches: Pipeline batches in an optimizer step.
        outside_ms: Time of a step outside of its batches: optimizer, clipping, data.
        time_limit_s: Limit on the solver's time for a case, seconds.
    """

    schedules: tuple[str, ...]
    caps: tuple[float, ...]
    microbatches: tuple[int, ...]
    splits: tuple[str | Split, ...]
    n_ranks: int
    first_stage: str = ALL_OR_NOTHING
    skip_input_grads: str = USE
    n_processors: float | None = None
    message_ms: float = 0.0
    batches: int = 1
    outside_ms: float = 0.0
    time_limit_s: float = 60.0

    def step_ms(self, batch_ms: float) -> float:
        """Return the time of a step of batches that take ``batch_ms``."""
        return self.batches * batch_ms + self.outside_ms
