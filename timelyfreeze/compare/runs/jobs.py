"""The runs of a comparison, made one after another unless finished.

A run's folder below the output is its ``job.dump_folder``, with log and record. The record holds
the start settings, so that runs of other settings are told apart.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, starmap
from pathlib import Path
from typing import Any

from tqdm import tqdm

from timelyfreeze.cli import run_environment, train_command
from timelyfreeze.cli.checker import errors_of
from timelyfreeze.cli.hub import config_table, is_on, value_of
from timelyfreeze.compare.runs.parts import RECORD, can_go_on
from timelyfreeze.compare.runs.run import SET_ASIDE, finished_run
from timelyfreeze.files import listed, read_object, write_whole

ROOT = Path(__file__).resolve().parents[3]
DEGREE = "parallelism.pipeline_parallel_degree"
_DEGREES = (
    DEGREE,
    "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree",  # -1 is what is left, here nothing
    "parallelism.context_parallel_degree",
    "parallelism.tensor_parallel_degree",
)
LOG = "train.log"
_TRAINER = "torchtitan.freezing.launch"
_EVALUATE = "torchtitan.evaluation.command"
TAIL_LINES = 25

# From a command, its environment and its log file to the exit status.
Starter = Callable[[Sequence[str], Mapping[str, str], Path], int]


@dataclass(frozen=True)
class Settings:
    """Settings common to all runs of a comparison."""

    config: Path  # TOML file
    arguments: tuple[str, ...] = ()  # of the trainer
    degree: int | None = None  # ranks of the pipeline; None for as many as the configuration says

    @property
    def keys(self) -> set[str]:
        """Keys set by the arguments, spelled as in the TOML file."""
        flags = (word.split("=")[0] for word in self.arguments if word.startswith("--"))
        return {flag.removeprefix("--").replace("-", "_") for flag in flags}

    def is_on(self, key: str) -> bool:
        """Return whether the runs have ``key`` switched on; keys are off by default."""
        return is_on(self.arguments, config_table(self.config), key)

    @property
    def n_ranks(self) -> int:
        """Number of ranks of the configuration: of a pipeline, times replicas."""
        table = config_table(self.config)
        values = (str(value_of(self.arguments, table, key)) for key in _DEGREES)
        return math.prod(int(text) for text in values if text.isdecimal())


@dataclass(frozen=True)
class Job:
    """A run to be made; jobs of a path are the same run."""

    label: str  # what a reader calls it
    path: Path  # its folder, relative to the output
    nproc: int  # its processes
    keys: Mapping[str, Any]  # keys of the configuration that make the run this one
    record: Mapping[str, Any]  # what is kept beside the run: its schedule, method and seed among it
    # Gives, from the output, further keys that follow from runs made before.
    fit: Callable[[Path], Mapping[str, Any]] | None = None

    def fitted(self, output: Path) -> Job:
        """Return the job with all its keys."""
        if self.fit is None:
            return self
        keys = self.fit(output)
        return replace(self, keys={**self.keys, **keys}, record={**self.record, "fitted": keys})

    def command(self, settings: Settings, folder: Path) -> list[str]:
        """Return the command of the run in ``folder``."""
        return train_command(settings.config, self.nproc, self.words(settings, folder))

    def words(self, settings: Settings, folder: Path) -> list[str]:
        """Return the keys as arguments, with ``settings.degree`` as the default."""
        keys = {"job.dump_folder": folder, **self.keys}
        if settings.degree is not None and DEGREE not in settings.keys:
            keys.setdefault(DEGREE, settings.degree)
        # What is fitted holds against the trainer's arguments, which it was fitted to.
        fitted = (f"--{key}={value}" for key, value in self.record.get("fitted", {}).items())
        return [*starmap(word, keys.items()), *settings.arguments, *fitted]


def word(key: str, value: Any) -> str:
    """Return an argument of the trainer."""
    if isinstance(value, bool):
        section, _, name = key.rpartition(".")
        return f"--{key}" if value else f"--{section}.no_{name}"
    return f"--{key}={value}"


def start(arguments: Sequence[str], variables: Mapping[str, str], log: Path) -> int:
    """Run a command in the repository, its output in ``log``, and return its exit status."""
    with (
        log.open("a") as file,
        subprocess.Popen(arguments, cwd=ROOT, env=variables, stdout=file, stderr=file) as process,
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
    """End the current run with the command when stopped, and print how to go on."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Interrupted; the same command goes on from here") from None
    finally:
        signal.signal(signal.SIGTERM, before)


def run_jobs(
    jobs: Sequence[Job],
    settings: Settings,
    output: Path,
    *,
    starter: Starter = start,
    then: Callable[[Job], bool] | None = None,
) -> list[Job]:
    """Make the unfinished runs, print progress, and return the failed.

    ``then`` gets every finished run, of now or before; False counts as a failure.
    """
    if found := list(_conflicts(jobs, settings, output)):
        raise ValueError("\n       ".join(found))
    output.mkdir(parents=True, exist_ok=True)
    done = {job.path for job in jobs if finished_run(output / job.path)}
    failed: list[Job] = []
    seconds: list[float] = []
    for number, job in enumerate(jobs, 1):
        print(f"[{number}/{len(jobs)}] {job.label}: ", end="", flush=True)
        if job.path in done:
            print("finished before", flush=True)
            failed += [] if then is None or then(job) else [job]
            continue
        try:
            job = job.fitted(output)
        except ValueError as error:
            failed.append(job)
            done.add(job.path)
            print(f"failed: {error}", flush=True)
            continue
        print("...", end="", flush=True)
        started = time.monotonic()
        status = _run_one(job, settings, output, starter)
        seconds.append(time.monotonic() - started)
        took = tqdm.format_interval(seconds[-1])
        left = len(jobs) - len(done) - len(seconds)
        to_go = f"{tqdm.format_interval(statistics.fmean(seconds) * left)} to go"
        if status == 0 and finished_run(output / job.path):
            print(f" {took}, {to_go}", flush=True)
            failed += [] if then is None or then(job) else [job]
            seconds[-1] = time.monotonic() - started
            continue
        failed.append(job)
        reason = f"exit status {status}" if status else "no summary of all steps"
        print(f" failed after {took} ({reason}), {to_go}")
        print_end(output / job.path / LOG)
    return failed


def print_end(log: Path) -> None:
    """Print the last lines of a log, if there is one."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    print("\n    ".join([f"  the end of {log}:", *lines[-TAIL_LINES:]]), flush=True)


def _conflicts(jobs: Sequence[Job], settings: Settings, output: Path) -> Iterator[str]:
    """Yield a message per finished run in ``output`` with other settings."""
    for job in jobs:
        path = output / job.path / RECORD  # without one it was not started here
        if not (path.is_file() and finished_run(output / job.path)):
            continue
        before = read_object(path).get("settings") or {}
        for key, value in _same(job, settings).items():
            if before.get(key) != value:
                yield (
                    f"{job.label} in {output} was run with {key} {before.get(key)}, "
                    f"asked for is {value}; choose another OUTPUT"
                )


def _same(job: Job, settings: Settings) -> dict[str, Any]:
    """Return a run's identity: the configuration's content counts, not its place."""
    return {
        "config_sha256": hashlib.sha256(settings.config.read_bytes()).hexdigest(),
        "arguments": list(settings.arguments),
        "nproc": job.nproc,
        "steps_factor": job.record.get("steps_factor", 1.0),
        "keys": job.record.get("keys"),
    }


def _run_one(job: Job, settings: Settings, output: Path, starter: Starter) -> int:
    """Make a run, keep its record, and return its exit status.

    What was cut off goes on from its last checkpoint, if all before that is known. What else an
    unfinished run left goes out of the way.
    """
    folder = output / job.path
    same = {"settings": _same(job, settings), "fitted": job.record.get("fitted")}
    if folder.is_dir() and not _was_cut_off(folder, same):
        places = (output / SET_ASIDE / f"{job.path}_{i}" for i in count(1))
        aside = next(place for place in places if not place.exists())
        aside.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(aside)
    folder.mkdir(parents=True, exist_ok=True)

    def keep(exit_status: int | None) -> None:
        record = {**job.record, "settings": same["settings"], "exit_status": exit_status}
        write_whole(folder / RECORD, (json.dumps(record, indent=2) + "\n").encode())

    keep(None)
    environment = run_environment(os.environ, job.nproc)
    status = starter(job.command(settings, folder), environment, folder / LOG)
    keep(status)
    return status


def _was_cut_off(folder: Path, same: Mapping[str, Any]) -> bool:
    """Return whether a run of the same settings ended with its command, and can go on."""
    path = folder / RECORD
    record = read_object(path) if path.is_file() else {"exit_status": "unknown"}
    is_same = all(record.get(key) == value for key, value in same.items())
    return is_same and record.get("exit_status") is None and can_go_on(folder)


def require_startable(jobs: Sequence[Job], settings: Settings, output: Path) -> None:
    """Check the configurations of all runs still to be made, in a single process.

    Values fitted to earlier runs are unknown yet, and are checked by their run.
    """
    waiting = [job for job in jobs if not finished_run(output / job.path)]
    if not waiting:
        return
    nproc = waiting[0].nproc  # as of all
    variables = {**run_environment(os.environ, nproc), "WORLD_SIZE": str(nproc)}
    lines = []
    for job in waiting:
        folder = output / job.path
        if folder.exists():  # what is in it is set aside, or was started before
            folder = folder.with_name(f"{folder.name}_new")
        lines.append([f"--job.config_file={settings.config}", *job.words(settings, folder)])
    found: dict[str, list[str]] = {}
    for job, error in zip(waiting, errors_of(_TRAINER, lines, variables, ROOT), strict=True):
        if error is not None:
            found.setdefault(error, []).append(job.label)
    if found:
        told = (f"{listed(labels)} cannot start:\n{error}" for error, labels in found.items())
        raise ValueError("\n".join(told))


def require_scorable(arguments: Sequence[str]) -> None:
    """Check the arguments of ``timelyfreeze evaluate`` for all runs."""
    (error,) = errors_of(_EVALUATE, [arguments], run_environment(os.environ, 1), ROOT)
    if error is not None:
        raise ValueError(f"--evaluate: {error.rpartition('error: ')[2]}")
