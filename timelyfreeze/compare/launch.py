"""Makes the runs of a comparison one after another, those left that did not finish before.

A run has the folder ``<output>/<schedule>/<method>/seed_<seed>``, which is its ``job.dump_folder``
and holds its log and its record. The record says how the run was started, so that runs of other
settings are not taken for runs of these.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from timelyfreeze.compare.jobs import ROOT, environment
from timelyfreeze.compare.runs import FINISHED, RECORD, SET_ASIDE, find_runs, read_object

LOG = "train.log"
TAIL_LINES = 25

# From a command, its environment and its log file to the exit status.
Starter = Callable[[Sequence[str], Mapping[str, str], Path], int]


class Job(Protocol):
    """One run to be made; jobs that are equal are the same run."""

    @property
    def label(self) -> str:
        """What a reader calls the run."""

    @property
    def path(self) -> Path:
        """The run's folder, relative to the output."""

    def to_record(self) -> dict[str, Any]:
        """Return what is kept beside the run: schedule, method and seed among it."""


JobT = TypeVar("JobT", bound=Job)


class Settings(Protocol[JobT]):
    """What all runs fraction."""

    def to_record(self) -> dict[str, Any]:
        """Return what must be equal for two runs to belong together."""

    def n_processes(self, job: JobT) -> int:
        """Return how many processes a run has."""

    def command(self, job: JobT, folder: Path) -> list[str]:
        """Return the command that makes the run of ``job`` in ``folder``."""


def start(arguments: Sequence[str], variables: Mapping[str, str], log: Path) -> int:
    """Run a command in the repository, its output in ``log``, and return its exit status."""
    with (
        log.open("w") as file,
        subprocess.Popen(
            arguments, cwd=ROOT, env=variables, stdout=file, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            return process.wait()
        except BaseException:
            # torchrun ends its workers when it is asked to end, not when it is killed.
            process.terminate()
            process.wait()
            raise


def visible_gpus() -> int:
    """Return how many GPUs a run could use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return sum(1 for name in named.split(",") if name)
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return 0
    return sum(1 for line in done.stdout.splitlines() if line.startswith("GPU"))


def is_finished(folder: Path) -> bool:
    """Tell whether a run in ``folder`` did all its steps."""
    return folder.is_dir() and any(run.status == FINISHED for run in find_runs([folder]).runs)


def conflicts(jobs: Sequence[JobT], settings: Settings[JobT], output: Path) -> Iterator[str]:
    """Yield a message for each finished run in ``output`` that was made with other settings.

    Runs without a record were not started here; nothing is known against them.
    """
    asked = settings.to_record()
    for job in jobs:
        path = output / job.path / RECORD
        if not (path.is_file() and is_finished(output / job.path)):
            continue
        before = read_object(path).get("settings") or {}
        for key, value in asked.items():
            if before.get(key) != value:
                yield (
                    f"{job.label} in {output} was run with {key} {before.get(key)}, "
                    f"asked for is {value}; choose another OUTPUT"
                )


def run_jobs(
    jobs: Sequence[JobT], settings: Settings[JobT], output: Path, *, starter: Starter = start
) -> list[JobT]:
    """Make those of the runs that are not finished, and print how it goes.

    Returns:
        The jobs that failed.
    """
    n_gpus, n_cores = visible_gpus(), len(os.sched_getaffinity(0))
    done = {job for job in jobs if is_finished(output / job.path)}
    failed: list[JobT] = []
    seconds: list[float] = []
    for number, job in enumerate(jobs, 1):
        print(f"[{number}/{len(jobs)}] {job.label}: ", end="", flush=True)
        if job in done:
            print("finished before", flush=True)
            continue
        print("...", end="", flush=True)
        folder = output / job.path
        variables = environment(
            os.environ, nproc=settings.n_processes(job), n_gpus=n_gpus, n_cores=n_cores
        )
        started = time.monotonic()
        status = _run_one(job, settings, output, variables, starter)
        seconds.append(time.monotonic() - started)
        left = len(jobs) - len(done) - len(seconds)
        to_go = f"{duration(statistics.fmean(seconds) * left)} to go"
        if status == 0 and is_finished(folder):
            print(f" {duration(seconds[-1])}, {to_go}", flush=True)
            continue
        failed.append(job)
        reason = f"exit status {status}" if status else "no summary of all steps"
        print(f" failed after {duration(seconds[-1])} ({reason}), {to_go}")
        print(f"  the end of {folder / LOG}:\n{tail(folder / LOG)}", flush=True)
    return failed


def _run_one(
    job: JobT,
    settings: Settings[JobT],
    output: Path,
    variables: Mapping[str, str],
    starter: Starter,
) -> int:
    """Make one run from its first step, keep its record, and return its exit status."""
    set_aside(output, job)
    folder = output / job.path
    folder.mkdir(parents=True, exist_ok=True)
    record = {**job.to_record(), "settings": settings.to_record(), "exit_status": None}
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    status = starter(settings.command(job, folder), variables, folder / LOG)
    (folder / RECORD).write_text(json.dumps({**record, "exit_status": status}, indent=2) + "\n")
    return status


def set_aside(output: Path, job: Job) -> None:
    """Move what an unfinished run left out of the next one's way.

    Its checkpoints above all: the next run would go on from them, and measure a part only.
    """
    old = output / job.path
    if not old.is_dir():
        return
    number = 1
    while (new := output / SET_ASIDE / f"{job.path}_{number}").exists():
        number += 1
    new.parent.mkdir(parents=True, exist_ok=True)
    old.rename(new)


def tail(log: Path) -> str:
    """Return the last lines of ``log``, indented."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])


def duration(seconds: float) -> str:
    """Return ``seconds`` in the unit that a reader would use."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"
