"""What TensorBoard is told of freezing, by tag."""

from __future__ import annotations

from timelyfreeze.control.collected import CollectedFigures
from timelyfreeze.control.controller import FreezeController
from timelyfreeze.settings.phases import Phase

_MIB = 1024**2
# A curve needs numbers.
PHASE_NUMBERS = {
    Phase.WARMUP: 0.0,
    Phase.UPPER_BOUND: 1.0,
    Phase.MIXED: 1.5,  # both bounds at once
    Phase.LOWER_BOUND: 2.0,
    Phase.RAMP: 3.0,
    Phase.STABLE: 4.0,
    Phase.OFF: 5.0,
}


def logged_figures(
    controller: FreezeController, figures: CollectedFigures, predicted_ms: float | None
) -> dict[str, float]:
    """Return the figures of a logged step; what is not known has no tag.

    Args:
        controller: Says what the step was for and what it was to freeze.
        figures: What all ranks have measured since the last time.
        predicted_ms: Time of a batch of this step, as predicted.
    """
    logged = {
        "freezing/phase": PHASE_NUMBERS[controller.phase],
        "freezing/average_freeze_ratio": figures.average_freeze_ratio,
    }
    for stage, ratio in controller.expected_stage_ratios().items():
        logged[f"freezing_expected_ratio/stage_{stage}"] = ratio
    for stage, ratio in figures.applied_stage_ratios.items():
        logged[f"freezing_actual_ratio/stage_{stage}"] = ratio
    for name, figure in figures.policy.items():
        logged[f"freezing_policy/{name}"] = figure
    if figures.score_ms_per_step is not None and figures.score_bytes is not None:
        logged["freezing_score/time(ms)"] = figures.score_ms_per_step
        logged["freezing_score/memory(MiB)"] = figures.score_bytes / _MIB
    latest = figures.batch_ms.get(controller.phase)
    if latest:
        logged["batch_time/measured(ms)"] = sorted(latest)[len(latest) // 2]
    if predicted_ms is not None:
        logged["batch_time/predicted(ms)"] = predicted_ms
    if figures.slowness is not None:
        logged["batch_time/slowness"] = figures.slowness
    return logged
