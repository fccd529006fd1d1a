"""The runs that show whether predictions hold, and how each is started."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from timelyfreeze.compare import jobs as comparison_jobs

EMULATED, REAL = "emulated", "real"


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


@dataclass(frozen=True)
class Job:
    """One run to be made."""

    pipeline: Pipeline
    schedule: str
    max_freeze_ratio: float
    repeat: int

    @property
    def label(self) -> str:
        """What a reader calls the run."""
        return (
            f"{self.pipeline.name} {self.schedule} r_max {self.max_freeze_ratio:g} "
            f"repeat {self.repeat}"
        )

    @property
    def path(self) -> Path:
        """The run's folder, relative to the output."""
        return Path(
            f"{self.pipeline.kind}_{self.pipeline.ranks}",
            self.schedule,
            f"r_{self.max_freeze_ratio:g}",
            f"repeat_{self.repeat}",
        )

    def keys(self) -> dict[str, Any]:
        """Return the keys of the configuration that make the run this one."""
        return {
            "parallelism.pipeline_parallel_degree": self.pipeline.ranks,
            "parallelism.pipeline_parallel_schedule": self.schedule,
            "freezing.max_freeze_ratio": self.max_freeze_ratio,
        }

    def to_record(self) -> dict[str, Any]:
        """Return what is kept of the job beside its run."""
        return {**asdict(self), "method": "timelyfreeze", "seed": None}


@dataclass(frozen=True)
class Settings:
    """What all runs fraction.

    Attributes:
        config: The TOML file.
        arguments: Further arguments of the trainer.
    """

    config: Path
    arguments: tuple[str, ...] = ()

    def to_record(self) -> dict[str, Any]:
        """Return what must be equal for two runs to stand in one table."""
        return comparison_jobs.Settings(self.config, 1, self.arguments).to_record()

    def n_processes(self, job: Job) -> int:
        """Return how many processes a run has."""
        return 1 if job.pipeline.kind == EMULATED else job.pipeline.ranks

    def command(self, job: Job, folder: Path) -> list[str]:
        """Return the command that makes the run of ``job`` in ``folder``."""
        keys = {"job.config_file": self.config, "job.dump_folder": folder, **job.keys()}
        return [
            sys.executable, "-m", "torch.distributed.run",
            f"--nproc_per_node={self.n_processes(job)}",
            "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "-m", "torchtitan.freezing",
            *(f"--{key}={value}" for key, value in keys.items()),
            *(["--emulation.enable"] if job.pipeline.kind == EMULATED else []),
            *self.arguments,
        ]  # fmt: skip


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
        Job(pipeline, schedule, ratio, repeat)
        for repeat in range(n_repeats)
        for schedule in schedules
        for ratio in ratios
        for pipeline in pipelines
    ]


def errors(jobs: Sequence[Job], settings: Settings) -> list[str]:
    """Return what is wrong with what was asked for, one message for each error."""
    found = []
    if not settings.config.is_file():
        found.append(f"CONFIG is {str(settings.config)!r}; it must be a TOML file")
    if not jobs:
        found.append("--repeats is below 1; there is nothing to run")
    for ratio in sorted({job.max_freeze_ratio for job in jobs}):
        if not 0.0 <= ratio <= 1.0:
            found.append(f"--r-max is {ratio}; it must lie in [0, 1]")
    twice = sorted({job.label for job in jobs if jobs.count(job) > 1})
    if twice:
        found.append(f"asked for twice: {', '.join(twice)}; name each once")
    ours = {"job.config_file", "job.dump_folder", "emulation.enable"}
    ours |= {"freezing.method"}.union(*(job.keys() for job in jobs))
    found += [
        f"--{key} is among the trainer's arguments; the table is about it, leave it out"
        for key in sorted(ours & comparison_jobs.given_keys(settings.arguments))
    ]
    return found
