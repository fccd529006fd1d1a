"""The runs that show whether predictions hold, and how each is started."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from timelyfreeze.compare import jobs as comparison_jobs
from timelyfreeze.compare.jobs import DEGREE, Job, Settings

EMULATED, REAL = "emulated", "real"
MAX_RATIO = "freezing.max_freeze_ratio"


@dataclass(frozen=True)
class Pipeline:
    """How a pipeline runs: its ranks in one process, or a process for each.

    Attributes:
        kind: ``emulated`` or ``real``.
        ranks: Number of pipeline ranks.
    """

    kind: str
    ranks: int

    @property
    def name(self) -> str:
        """As on the command line."""
        return f"{self.kind}:{self.ranks}"


def parse_pipeline(text: str) -> Pipeline:
    """Read a pipeline as it stands on the command line, such as ``emulated:4``.

    Raises:
        ValueError: If it is none.
    """
    kind, _, ranks = text.partition(":")
    if kind not in (EMULATED, REAL) or not ranks.isdecimal() or int(ranks) < 2:
        raise ValueError(
            f"--pipelines has {text!r}; it must be {EMULATED}:N or {REAL}:N with 2 ranks or more"
        )
    return Pipeline(kind, int(ranks))


def plan_jobs(
    pipelines: Iterable[Pipeline],
    schedules: Iterable[str],
    ratios: Iterable[float],
    n_repeats: int,
) -> list[Job]:
    """Return the jobs in the order they run in.

    What is set against each other, the same pipeline emulated and real, follows each other.
    """
    pipelines, schedules, ratios = list(pipelines), list(schedules), list(ratios)
    return [
        _job(pipeline, schedule, ratio, repeat)
        for repeat in range(n_repeats)
        for schedule in schedules
        for ratio in ratios
        for pipeline in pipelines
    ]


def _job(pipeline: Pipeline, schedule: str, ratio: float, repeat: int) -> Job:
    is_emulated = pipeline.kind == EMULATED
    folder = f"{pipeline.kind}_{pipeline.ranks}"
    return Job(
        label=f"{pipeline.name} {schedule} r_max {ratio:g} repeat {repeat}",
        path=Path(folder, schedule, f"r_{ratio:g}", f"repeat_{repeat}"),
        nproc=1 if is_emulated else pipeline.ranks,
        keys={
            DEGREE: pipeline.ranks,
            "parallelism.pipeline_parallel_schedule": schedule,
            MAX_RATIO: ratio,
            **({"emulation.enable": True} if is_emulated else {}),
        },
        record={"schedule": schedule, "method": "timelyfreeze", "seed": None},
    )


def errors(jobs: Sequence[Job], settings: Settings) -> list[str]:
    """Return what is wrong with what was asked for, one message for each error."""
    found = comparison_jobs.errors(jobs, settings, ["freezing.method", "emulation.enable"])
    if not jobs:
        found.append("--repeats is below 1; there is nothing to run")
    for ratio in sorted({job.keys[MAX_RATIO] for job in jobs}):
        if not 0.0 <= ratio <= 1.0:
            found.append(f"--r-max is {ratio}; it must lie in [0, 1]")
    return found
