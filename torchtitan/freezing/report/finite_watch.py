"""Tells when the loss or the gradient norm stops being a number, and what was frozen then."""

from __future__ import annotations

import math
from collections.abc import Mapping

from timelyfreeze.settings import Phase


class FiniteWatch:
    """Looks at each logged step; upstream logs what is not finite and trains on."""

    def __init__(self) -> None:
        self._was_finite = True

    def note(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        phase: Phase | None = None,
        stage_ratios: Mapping[int, float] | None = None,
    ) -> str | None:
        """Return a warning at the first step of each spell that is not finite.

        Args:
            step: The logged step.
            loss: Its training loss.
            grad_norm: Its gradient norm.
            phase: What the step was for; None where nothing is frozen by design.
            stage_ratios: What was frozen of each stage in it.
        """
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        was_finite, self._was_finite = self._was_finite, is_finite
        if is_finite or not was_finite:
            return None
        text = f"Step {step} has loss {loss:g} and gradient norm {grad_norm:g}"
        mend = "resume from a checkpoint before it, with a lower optimizer.lr or another debug.seed"
        if phase is not None:
            ratios = " ".join(f"{s}:{ratio:.2f}" for s, ratio in (stage_ratios or {}).items())
            text += (
                f", in freezing phase {phase.value}, frozen of each stage: {ratios or 'unknown'}"
            )
            mend += ", or a lower freezing.max_freeze_ratio"
        return f"{text}; weights that are not finite stay so: {mend}"
