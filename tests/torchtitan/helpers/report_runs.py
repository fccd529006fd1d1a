"""Runs that parts of a report look on at, and what happens in them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.torchtitan.helpers.summaries import make_summary
from timelyfreeze.control.collected import CollectedMetrics
from timelyfreeze.records.summary import RunSummary
from timelyfreeze.settings.phases import Phase
from torchtitan.freezing.report.parts import EndedStep, LoggedStep, Run, RunPart
from torchtitan.settings.job_config import JobConfig

ALONE: Any = SimpleNamespace(all_gather=lambda value: [value])


def run_in(
    folder: Path = Path(), start: RunSummary | None = None, *, is_shown: bool = True, **known: Any
) -> Run:
    """A run of one process in ``folder``; ``known`` are further attributes."""
    start = start or make_summary(n_devices=4, ranks_per_replica=4)
    known = {"config": JobConfig(), "exchange": ALONE, **known}
    return Run(start=start, folder=folder, is_shown=is_shown, **known)


def end_step(
    part: RunPart, step: int, phase: Phase | None, seconds: float, of_device: float = 200
) -> None:
    part.run.seconds += seconds
    part.end_step(EndedStep(step, phase, seconds, int(4 * of_device), of_device))


def log_step(
    part: RunPart,
    step: int,
    loss: float = 5.0,
    phase: Phase | None = None,
    metrics: CollectedMetrics | None = None,
    grad_norm: float = 1.0,
) -> dict[str, float]:
    if metrics is not None:
        part.collect(metrics)
    tags = part.log_step(LoggedStep(step, loss, grad_norm, phase, metrics)) or {}
    return {tag: value for tag, value in tags.items() if value is not None}
