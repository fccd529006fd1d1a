"""The short report at the end of a run: what freezing brought, and whether the prediction held."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from timelyfreeze.records import RunSummary


def render_report(summary: RunSummary, run_folder: Path) -> str:
    """Return the report of a run.

    Args:
        summary: The run's metrics; a line whose metrics are missing is left out or says so.
        run_folder: Where the run's files are.
    """
    lines = ["", "Run report", "----------"]
    if summary.ended_early is not None:
        lines.append(f"ended early              {summary.ended_early}")
    as_run = summary
    if summary.emulated_ranks is not None:
        lines.append(
            f"emulated                 {summary.emulated_ranks} ranks in one process; times are "
            "those of a device for each rank, without communication"
        )
        summary = by_virtual_clock(summary)
    lines += _unfrozen_run(summary) if summary.method == "none" else _frozen_run(summary)
    lines += _on_one_device(as_run)
    if summary.validation_loss is not None:
        lines.append(f"validation loss          {summary.validation_loss:.4f}")
    if summary.reference_run is not None:
        reached = summary.seconds_to_reference_loss
        when = "not reached" if reached is None else f"reached after {reached:,.1f} s"
        lines.append(
            f"loss of the reference    {summary.reference_loss:.4f}, {when}; the reference took "
            f"{summary.reference_seconds:,.1f} s"
        )
    lines.append(f"files                    {run_folder}")
    lines.append(f"TensorBoard              tensorboard --logdir {run_folder.parent}")
    return "\n".join(lines) + "\n"


def by_virtual_clock(summary: RunSummary) -> RunSummary:
    """Return the summary of an emulated run with its steps as devices would have taken them."""
    return replace(
        summary,
        tokens_per_second_unfrozen=summary.virtual_tokens_per_second_unfrozen,
        tokens_per_second=summary.virtual_tokens_per_second,
        step_ms_unfrozen=summary.virtual_step_ms_unfrozen,
        step_ms=summary.virtual_step_ms,
        step_ms_off=summary.virtual_step_ms_off,
    )


def _on_one_device(summary: RunSummary) -> Iterator[str]:
    """Say what an emulation itself took."""
    if summary.emulated_ranks is None or summary.step_ms is None:
        return
    batch = f", {summary.real_batch_ms:.1f} ms a batch" if summary.real_batch_ms is not None else ""
    yield (
        f"as run on one device     {summary.tokens_per_second:,.0f} tokens/s, "
        f"{summary.step_ms:.1f} ms a step{batch}"
    )


def _unfrozen_run(summary: RunSummary) -> Iterator[str]:
    if summary.tokens_per_second is None:
        yield "too few steps to measure"
    else:
        yield f"tokens/s per device      {summary.tokens_per_second:,.0f}"


def _frozen_run(summary: RunSummary) -> Iterator[str]:
    yield from _speed(summary)
    if summary.failure is not None:
        yield f"no freeze plan           {summary.failure}"
        return
    yield from _batches(summary)
    if summary.planned_stage_ratios is not None:
        yield f"planned freeze ratio     stage {_by_stage(summary.planned_stage_ratios)}"
    if summary.stage_ratios is not None:
        yield f"applied in the last step stage {_by_stage(summary.stage_ratios)}"
    if summary.average_freeze_ratio is not None:
        yield f"average freeze ratio     {summary.average_freeze_ratio:.3f} over all steps"
    if summary.kappa_over_p_eff is not None:
        yield (
            f"kappa / p_eff            {summary.kappa:.2f} / {summary.p_eff:.2f} = "
            f"{summary.kappa_over_p_eff:.2f}; a loss is reached sooner with freezing if below 1"
        )


def _speed(summary: RunSummary) -> Iterator[str]:
    before_ms, after_ms = summary.step_ms_unfrozen, summary.step_ms
    if before_ms is not None:
        yield (
            f"without freezing         {summary.tokens_per_second_unfrozen:,.0f} "
            f"tokens/s per device, {before_ms:.1f} ms a step"
        )
    if after_ms is not None:
        yield (
            f"with freezing            {summary.tokens_per_second:,.0f} "
            f"tokens/s per device, {after_ms:.1f} ms a step"
        )
    if before_ms is not None and after_ms is not None:
        yield f"gain                     {100 * (before_ms / after_ms - 1):+.1f}% throughput"
    if summary.switched_off is not None:
        yield f"freezing switched off    {summary.switched_off}"
    if summary.step_ms_off is not None:
        yield f"since then               {summary.step_ms_off:.1f} ms a step"


def _batches(summary: RunSummary) -> Iterator[str]:
    for name, predicted_ms, measured_ms in (
        (
            "batch without freezing",
            summary.batch_ms_unfrozen_predicted,
            summary.batch_ms_unfrozen,
        ),
        ("batch with freezing", summary.batch_ms_predicted, summary.batch_ms),
    ):
        yield f"{name:<24} {_predicted_and_measured(predicted_ms, measured_ms)}"
    if summary.step_ms_predicted is not None:
        step = _predicted_and_measured(summary.step_ms_predicted, summary.step_ms)
        yield f"step with freezing       {step}; {summary.outside_ms:.1f} ms outside of batches"
    if summary.drift is not None:
        yield (
            f"speed of the machine     forwards took {summary.drift:.2f} times as long as when "
            "they were measured"
        )
    if summary.all_frozen_batch_ms is not None:
        yield (
            f"upper bound              {summary.all_frozen_batch_ms:.1f} ms a batch with "
            f"everything frozen ({100 * summary.upper_bound_gain:+.1f}%); the plan reaches "
            f"{100 * summary.planned_gain:+.1f}%"
        )


def _predicted_and_measured(predicted_ms: float | None, measured_ms: float | None) -> str:
    measured = "not measured" if measured_ms is None else f"measured {measured_ms:.1f} ms"
    if predicted_ms is None:
        return measured
    text = f"predicted {predicted_ms:.1f} ms, {measured}"
    if measured_ms is None:
        return text
    return f"{text} ({100 * (measured_ms / predicted_ms - 1):+.1f}%)"


def _by_stage(ratios: Mapping[int, float]) -> str:
    return " ".join(f"{stage}: {ratio:.2f}" for stage, ratio in ratios.items())
