"""Every optimizer step of a run: ``steps.csv``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from timelyfreeze.files import Fraction, Number, OneOf, Seconds, Table
from timelyfreeze.settings import Phase


@dataclass(frozen=True)
class StepRow:
    """One optimizer step; None for what was not measured.

    Attributes:
        step: Its number, from 1.
        phase: Name of its phase; "" for a run without freezing.
        seconds: Sum of the step times up to and including this one, of this process's run.
        step_ms: How long it took.
        tokens_per_second: Of each device.
        virtual_step_ms: In an emulation, how long it would have taken on devices of their own.
        freeze_ratio: Fraction of all elements that its masks froze, mean over backwards and ranks.
        batch_ms: Median pipeline batch of the phase since the step before that was logged.
        batch_predicted_ms: Prediction for the batches of this step.
        train_loss: Where it was logged.
        kappa: Median step of the phase since the step before that was logged, over the median
            unfrozen step (arXiv:2602.05754, Eq. 12).
        p_eff: Fraction of the gradient energy that those steps updated (Eq. 27).
    """

    step: Number
    phase: Annotated[str, OneOf("", *(phase.value for phase in Phase))]
    seconds: Seconds
    step_ms: float
    tokens_per_second: float
    virtual_step_ms: float | None = None
    freeze_ratio: Fraction | None = None
    batch_ms: float | None = None
    batch_predicted_ms: float | None = None
    train_loss: float | None = None
    kappa: float | None = None
    p_eff: float | None = None


STEPS = Table("steps.csv", StepRow)
