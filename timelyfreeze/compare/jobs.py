"""The runs that a comparison asks for, and how each is started."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEGREE = "parallelism.pipeline_parallel_degree"


@dataclass(frozen=True)
class Job:
    """One run to be made."""

    schedule: str
    method: str
    seed: int

    @property
    def label(self) -> str:
        """What a reader calls the run."""
        return f"{self.schedule} {self.method} seed {self.seed}"

    @property
    def path(self) -> Path:
        """The run's folder, relative to the output."""
        return Path(self.schedule, self.method, f"seed_{self.seed}")

    def keys(self) -> dict[str, Any]:
        """Return the keys of the configuration that make the run this one."""
        return {
            "freezing.method": self.method,
            "parallelism.pipeline_parallel_schedule": self.schedule,
            "debug.seed": self.seed,
            "data.seed": self.seed,
            "freezing.seed": self.seed,
        }

    def to_record(self) -> dict[str, Any]:
        """Return what is kept of the job beside its run."""
        return asdict(self)


@dataclass(frozen=True)
class Settings:
    """What all runs of a comparison fraction.

    Attributes:
        config: The TOML file.
        nproc: Processes of a run.
        arguments: Further arguments of the trainer.
    """

    config: Path
    nproc: int
    arguments: tuple[str, ...] = ()

    def to_record(self) -> dict[str, Any]:
        """Return what must be equal for two runs to belong to one comparison.

        The file's content counts, not its place.
        """
        return {
            "config_sha256": hashlib.sha256(self.config.read_bytes()).hexdigest(),
            "nproc": self.nproc,
            "arguments": list(self.arguments),
        }

    def n_processes(self, job: Job) -> int:
        """Return how many processes a run has."""
        return self.nproc

    def command(self, job: Job, folder: Path) -> list[str]:
        """Return the command that makes the run of ``job`` in ``folder``."""
        return command(job, self, folder)


def plan_jobs(methods: Iterable[str], schedules: Iterable[str], seeds: Iterable[int]) -> list[Job]:
    """Return the jobs in the order they run in.

    Runs that are compared with each other, those of one seed and schedule, follow each other: a
    machine that slows down in the course of hours then slows all of them.
    """
    methods, schedules = list(methods), list(schedules)
    return [
        Job(schedule, method, seed)
        for seed in seeds
        for schedule in schedules
        for method in methods
    ]


def errors(jobs: Sequence[Job], settings: Settings) -> list[str]:
    """Return what is wrong with what was asked for, one message for each error."""
    found = []
    if not settings.config.is_file():
        found.append(f"CONFIG is {str(settings.config)!r}; it must be a TOML file")
    if settings.nproc < 1:
        found.append(f"--nproc is {settings.nproc}; it must be 1 or more")
    twice = sorted({job.label for job in jobs if jobs.count(job) > 1})
    if twice:
        found.append(f"asked for twice: {', '.join(twice)}; name each method and seed once")
    ours = {"job.config_file", "job.dump_folder"}.union(*(job.keys() for job in jobs))
    found += [
        f"--{key} is among the trainer's arguments; each run has its own, leave it out"
        for key in sorted(ours & given_keys(settings.arguments))
    ]
    return found


def given_keys(arguments: Iterable[str]) -> set[str]:
    """Return the keys that trainer ``arguments`` set, spelled as in the TOML file."""
    flags = (argument.split("=")[0] for argument in arguments if argument.startswith("--"))
    return {flag.removeprefix("--").replace("-", "_") for flag in flags}


def command(job: Job, settings: Settings, folder: Path) -> list[str]:
    """Return the command that makes the run of ``job`` in ``folder``.

    The pipeline is as deep as there are processes, unless the trainer's arguments say otherwise.
    """
    keys = {"job.config_file": settings.config, "job.dump_folder": folder, **job.keys()}
    if DEGREE not in given_keys(settings.arguments):
        keys[DEGREE] = settings.nproc
    return [
        sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={settings.nproc}",
        "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "-m", "torchtitan.freezing",
        *(f"--{key}={value}" for key, value in keys.items()), *settings.arguments,
    ]  # fmt: skip


def environment(
    base: Mapping[str, str], *, nproc: int, n_gpus: int, n_cores: int
) -> dict[str, str]:
    """Return the environment of a run, by the rules of ``run_train.sh``.

    Args:
        base: The environment that the script was started in.
        nproc: Processes of a run. With fewer GPUs than that, all of them use the CPU.
        n_gpus: GPUs that a run could use.
        n_cores: Cores that are shared among the processes on a CPU.
    """
    before = base.get("PYTHONPATH")
    variables = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TOKENIZERS_PARALLELISM": "false",
        **base,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{before}" if before else str(ROOT),
    }
    if n_gpus < nproc:
        variables["CUDA_VISIBLE_DEVICES"] = ""
        variables.setdefault("OMP_NUM_THREADS", str(max(1, n_cores // nproc)))
    return variables
