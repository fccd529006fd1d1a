"""What TensorBoard is told of freezing, by tag."""

from __future__ import annotations

from timelyfreeze.control import CollectedMetrics, FreezeController
from timelyfreeze.settings import Phase

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


def logged_metrics(
    controller: FreezeController, metrics: CollectedMetrics, predicted_ms: float | None
) -> dict[str, float]:
    """Return the metrics of a logged step; what is not known has no tag.

    Args:
        controller: Says what the step was for and what it was to freeze.
        metrics: What all ranks have measured since the last time.
        predicted_ms: Time of a batch of this step, as predicted.
    """
    logged = {
        "freezing/phase": PHASE_NUMBERS[controller.phase],
        "freezing/average_freeze_ratio": metrics.average_freeze_ratio,
    }
    for stage, ratio in controller.expected_stage_ratios().items():
        logged[f"freezing_expected_ratio/stage_{stage}"] = ratio
    for stage, ratio in metrics.applied_stage_ratios.items():
        logged[f"freezing_actual_ratio/stage_{stage}"] = ratio
    for name, metric in metrics.policy.items():
        logged[f"freezing_policy/{name}"] = metric
    if metrics.score_ms_per_step is not None and metrics.score_bytes is not None:
        logged["freezing_score/time(ms)"] = metrics.score_ms_per_step
        logged["freezing_score/memory(MiB)"] = metrics.score_bytes / _MIB
    latest = metrics.batch_ms.get(controller.phase)
    if latest:
        logged["batch_time/measured(ms)"] = sorted(latest)[len(latest) // 2]
    if predicted_ms is not None:
        logged["batch_time/predicted(ms)"] = predicted_ms
    if metrics.drift is not None:
        logged["batch_time/drift"] = metrics.drift
    return logged
