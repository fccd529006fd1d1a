"""Makes the runs of a comparison one after another, those left that did not finish before.

A run has a folder of its own below the output, which is its ``job.dump_folder`` and holds its log
and its record. The record says how the run was started, so that runs of other settings are not
taken for runs of these.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from timelyfreeze.compare.jobs import ROOT, Job, Settings, environment, train_command
from timelyfreeze.compare.runs import FINISHED, RECORD, SET_ASIDE, find_runs
from timelyfreeze.files import read_object

LOG = "train.log"
TAIL_LINES = 25

# From a command, its environment and its log file to the exit status.
Starter = Callable[[Sequence[str], Mapping[str, str], Path], int]


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


@contextmanager
def resumable() -> Iterator[None]:
    """Make a command that is told to stop end the run on its way too, and say how to go on."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; the same command goes on from here")
    finally:
        signal.signal(signal.SIGTERM, before)


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


def run_jobs(
    jobs: Sequence[Job], settings: Settings, output: Path, *, starter: Starter = start
) -> list[Job]:
    """Make those of the runs that are not finished, and print how it goes.

    Returns:
        The jobs that failed.

    Raises:
        ValueError: If ``output`` has finished runs of other settings.
    """
    if found := list(_conflicts(jobs, settings, output)):
        raise ValueError("\n       ".join(found))
    output.mkdir(parents=True, exist_ok=True)
    done = {job.path for job in jobs if _is_finished(output / job.path)}
    failed: list[Job] = []
    seconds: list[float] = []
    for number, job in enumerate(jobs, 1):
        print(f"[{number}/{len(jobs)}] {job.label}: ", end="", flush=True)
        if job.path in done:
            print("finished before", flush=True)
            continue
        print("...", end="", flush=True)
        started = time.monotonic()
        status = _run_one(job, settings, output, starter)
        seconds.append(time.monotonic() - started)
        left = len(jobs) - len(done) - len(seconds)
        to_go = f"{duration(statistics.fmean(seconds) * left)} to go"
        if status == 0 and _is_finished(output / job.path):
            print(f" {duration(seconds[-1])}, {to_go}", flush=True)
            continue
        failed.append(job)
        log = output / job.path / LOG
        reason = f"exit status {status}" if status else "no summary of all steps"
        print(f" failed after {duration(seconds[-1])} ({reason}), {to_go}")
        print(f"  the end of {log}:\n{_tail(log)}", flush=True)
    return failed


def _conflicts(jobs: Sequence[Job], settings: Settings, output: Path) -> Iterator[str]:
    """Yield a message for each finished run in ``output`` that was made with other settings.

    Runs without a record were not started here; nothing is known against them.
    """
    for job in jobs:
        path = output / job.path / RECORD
        if not (path.is_file() and _is_finished(output / job.path)):
            continue
        before = read_object(path).get("settings") or {}
        for key, value in _record(job, settings)["settings"].items():
            if before.get(key) != value:
                yield (
                    f"{job.label} in {output} was run with {key} {before.get(key)}, "
                    f"asked for is {value}; choose another OUTPUT"
                )


def _record(job: Job, settings: Settings) -> dict[str, Any]:
    return {**job.record, "settings": {**settings.to_record(), "nproc": job.nproc}}


def _run_one(job: Job, settings: Settings, output: Path, starter: Starter) -> int:
    """Make one run from its first step, keep its record, and return its exit status."""
    _set_aside(output, job)
    folder = output / job.path
    folder.mkdir(parents=True, exist_ok=True)
    record = {**_record(job, settings), "exit_status": None}
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    n_cores = len(os.sched_getaffinity(0))
    variables = environment(os.environ, nproc=job.nproc, n_gpus=visible_gpus(), n_cores=n_cores)
    status = starter(train_command(job, settings, folder), variables, folder / LOG)
    (folder / RECORD).write_text(json.dumps({**record, "exit_status": status}, indent=2) + "\n")
    return status


def _is_finished(folder: Path) -> bool:
    """Tell whether a run in ``folder`` did all its steps."""
    return folder.is_dir() and any(run.status == FINISHED for run in find_runs([folder]).runs)


def _set_aside(output: Path, job: Job) -> None:
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


def _tail(log: Path) -> str:
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
