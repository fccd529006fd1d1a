"""Validators on instruction data in one process."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from torchtitan.data.sequences import PLAIN_TEMPLATE
from torchtitan.data.validation import InstructValidator, build_instruct_validator


class Processor:
    """What a validator uses of a metrics processor; upstream's also starts again at a log."""

    def __init__(self) -> None:
        self.ntokens_since_last_log = 0
        self.time_last_log = 0.0
        # Step, loss, tokens, and the time from which they count.
        self.logged: list[tuple[int, float, int, float]] = []

    def log_held_out(self, step: int, parts: list[tuple[int, float]]) -> None:
        self.parts = parts

    def log_validation(self, loss: float, step: int) -> None:
        self.logged.append((step, loss, self.ntokens_since_last_log, self.time_last_log))
        self.ntokens_since_last_log = 0
        self.time_last_log = -1.0


def build_validator(processor: Processor | None, **given: Any) -> InstructValidator:
    """Return the validator of one of ``dp_world_size`` readers without a pipeline."""
    dims = dict.fromkeys(("dp_enabled", "cp_enabled", "pp_enabled", "dp_cp_enabled"), False)
    return build_instruct_validator(
        template=PLAIN_TEMPLATE,
        parallel_dims=SimpleNamespace(**dims),
        validation_context=nullcontext,
        maybe_enable_amp=nullcontext(),
        metrics_processor=processor or Processor(),
        **{"dp_rank": 0, "dp_world_size": 1, **given},
    )
