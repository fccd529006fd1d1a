"""The runs that a comparison asks for, and how each is started."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEGREE = "parallelism.pipeline_parallel_degree"
_SEEDS = ("debug.seed", "data.seed", "freezing.seed")


@dataclass(frozen=True)
class Job:
    """One run to be made; jobs of one path are the same run.

    Attributes:
        label: What a reader calls it.
        path: Its folder, relative to the output.
        nproc: Its processes.
        keys: Keys of the configuration that make the run this one.
        record: What is kept beside the run: its schedule, method and seed among it.
    """

    label: str
    path: Path
    nproc: int
    keys: Mapping[str, Any]
    record: Mapping[str, Any]


@dataclass(frozen=True)
class Settings:
    """What the runs of a comparison have in common.

    Attributes:
        config: The TOML file.
        arguments: Further arguments of the trainer.
    """

    config: Path
    arguments: tuple[str, ...] = ()

    def to_record(self) -> dict[str, Any]:
        """Return what must be equal for two runs to belong to one comparison.

        The file's content counts, not its place.
        """
        return {
            "config_sha256": hashlib.sha256(self.config.read_bytes()).hexdigest(),
            "arguments": list(self.arguments),
        }


def plan_jobs(
    methods: Sequence[str], schedules: Sequence[str], seeds: Sequence[int], nproc: int
) -> list[Job]:
    """Return the jobs in the order they run in.

    Runs that are compared with each other, those of one seed and schedule, follow each other: a
    machine that slows down in the course of hours then slows all of them.
    """
    return [
        Job(
            label=f"{schedule} {method} seed {seed}",
            path=Path(schedule, method, f"seed_{seed}"),
            nproc=nproc,
            keys={
                "freezing.method": method,
                "parallelism.pipeline_parallel_schedule": schedule,
                **dict.fromkeys(_SEEDS, seed),
            },
            record={"schedule": schedule, "method": method, "seed": seed},
        )
        for seed in seeds
        for schedule in schedules
        for method in methods
    ]


def errors(jobs: Sequence[Job], settings: Settings, fixed: Iterable[str] = ()) -> list[str]:
    """Return what is wrong with what was asked for, one message for each error.

    Args:
        jobs: The runs.
        settings: What they have in common.
        fixed: Keys besides those of the jobs that the trainer's arguments may not set.
    """
    found = []
    if not settings.config.is_file():
        found.append(f"CONFIG is {str(settings.config)!r}; it must be a TOML file")
    labels = [job.label for job in jobs]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        found.append(f"asked for twice: {', '.join(twice)}; name each once")
    ours = {"job.config_file", "job.dump_folder", *fixed}.union(*(job.keys for job in jobs))
    found += [
        f"--{key} is among the trainer's arguments; each run has its own, leave it out"
        for key in sorted(ours & given_keys(settings.arguments))
    ]
    return found


def given_keys(arguments: Iterable[str]) -> set[str]:
    """Return the keys that trainer ``arguments`` set, spelled as in the TOML file."""
    flags = (argument.split("=")[0] for argument in arguments if argument.startswith("--"))
    return {flag.removeprefix("--").replace("-", "_") for flag in flags}


def train_command(job: Job, settings: Settings, folder: Path) -> list[str]:
    """Return the command that makes the run of ``job`` in ``folder``.

    The pipeline is as deep as there are processes, unless the job or the trainer's arguments say
    otherwise.
    """
    keys = {"job.config_file": settings.config, "job.dump_folder": folder, **job.keys}
    if DEGREE not in given_keys(settings.arguments):
        keys.setdefault(DEGREE, job.nproc)
    return [
        sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={job.nproc}",
        "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "-m", "torchtitan.freezing",
        *(f"--{key}" if value is True else f"--{key}={value}" for key, value in keys.items()),
        *settings.arguments,
    ]  # fmt: skip


def environment(
    base: Mapping[str, str], *, nproc: int, n_gpus: int, n_cores: int
) -> dict[str, str]:
    """Return the environment of a run, by the rules of ``run_train.sh``.

    Args:
        base: The environment that the command was started in.
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
