"""Trains for a given time with ranks that are killed at random, and beside it in peace.

Usage: python tests/multiprocess/helpers/soak.py OUTPUT --minutes 60 [--elastic]

The tiny model over 4 pipeline ranks on the CPU. One run is left alone; its memory and file handles
must stay level. The other is the same run, but every so often a rank gets SIGKILL or torchrun
SIGTERM, and it is started again until it has made all of its steps; in the end its weights must
equal the first one's, bit for bit. Measured times never repeat, so both take times that follow from
what was frozen (``faulty_run.py``). With ``--elastic`` the front freezes and the pipeline shrinks;
of three starts one is killed in the midst of its first move. Prints a table; ends with status 1 if
something leaked, was left behind or differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from faults import MARK, command_of, equal_weights, processes_left
from launcher import ROOT

from timelyfreeze.files import markdown_table
from timelyfreeze.files.options import new_folder, number, whole

N_RANKS = 4
_CALIBRATION_STEPS = 60
_SAMPLE_S = 2.0
# Of the time that is given, for the undisturbed run; restarts and what is done twice need more.
_FRACTION_IN_PEACE = 0.35
# Growth from the second quarter of a run to its last that still counts as level.
_MAX_GROWTH = 0.02
_MAX_NEW_HANDLES = 2


@dataclass
class Job:
    """A run that is started until it comes to its end, and what was seen of it."""

    seconds: float = 0.0
    starts: int = 0
    kills: dict[str, int] = field(default_factory=dict)
    left_behind: int = 0
    memory_mib: list[float] = field(default_factory=list)
    handles: list[int] = field(default_factory=list)


def elastic_settings(n_steps: int, folder: Path) -> dict[str, object]:
    """Return what makes the pipeline shrink along the run, and rows none of which is left out.

    Rows that are left out come some steps earlier or later for other readers.
    """
    rows = (ROOT / "tests/assets/tiny_instruct/train.jsonl").read_text().splitlines()
    short = sorted(rows, key=lambda row: len("".join(json.loads(row).values())))[:101]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("\n".join(short) + "\n")
    return {
        "training__dataset_path": folder / "rows.jsonl",
        "model__flavor": "8M",
        "parallelism__pipeline_parallel_microbatch_size": 1,
        "training__seq_len": 64,
        "freezing__method": "linear",
        "freezing__last_monitor_step": False,
        "freezing__last_ramp_step": False,
        "freezing__linear.check_interval": max(1, n_steps // 12),
        "freezing__linear.max_layers": 9,
        "freezing__elastic.enable": None,
    }


def settings(n_steps: int, folder: Path, *, is_elastic: bool) -> dict[str, object]:
    """Return the settings of both runs."""
    last_monitor = max(12, n_steps // 10)
    return {
        "job__dump_folder": folder,
        "parallelism__pipeline_parallel_degree": N_RANKS,
        "training__steps": n_steps,
        "training__global_batch_size": 8,
        "metrics__log_freq": 10,
        "checkpoint__interval": max(5, n_steps // 60),
        "checkpoint__keep_latest_k": 3,
        "freezing__last_warmup_step": 4,
        "freezing__last_monitor_step": last_monitor,
        "freezing__last_ramp_step": 2 * last_monitor,
        **(elastic_settings(n_steps, folder.parent) if is_elastic else {}),
    }


def train(
    folder: Path,
    n_steps: int,
    draw: random.Random | None,
    kill_every_s: float,
    *,
    is_elastic: bool = False,
) -> Job:
    """Run until all steps are made.

    Args:
        folder: Where the run's files go.
        n_steps: Optimizer steps.
        draw: Says when and whom to kill; None to leave the run alone.
        kill_every_s: Mean time between two kills, seconds.
        is_elastic: Whether the pipeline shrinks.
    """
    job, began = Job(), time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    chosen = settings(n_steps, folder, is_elastic=is_elastic)
    while not (folder / "weights_0.pt").is_file():
        fault = {}
        if is_elastic and draw is not None and draw.random() < 1.0 / 3.0:
            place = draw.choice(["hand_over", "take_over"])
            fault = {"at": place, "rank": draw.randrange(N_RANKS), "signal": "SIGKILL"}
        command = command_of(fault, folder, n_processes=N_RANKS, **chosen)
        mark = uuid.uuid4().hex
        environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: mark}
        job.starts += 1
        with (folder / f"output_{job.starts}.txt").open("w") as output:
            torchrun = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output
            )
            n_kills = sum(job.kills.values())
            watch(torchrun, job, draw, kill_every_s)
        if torchrun.returncode != 0 and sum(job.kills.values()) == n_kills and fault:
            whom = "a rank by SIGKILL in a move"
            job.kills[whom] = job.kills.get(whom, 0) + 1
        left = processes_left(mark, wait_s=40.0)
        job.left_behind += len(left)
        if draw is None and torchrun.returncode != 0:
            raise SystemExit(f"error: the undisturbed run failed; see {output.name}")
    job.seconds = time.monotonic() - began
    return job


def watch(
    torchrun: subprocess.Popen[bytes], job: Job, draw: random.Random | None, kill_every_s: float
) -> None:
    """Take samples of a start's ranks until it ends, which a signal may bring about."""
    due = None if draw is None else time.monotonic() + draw.expovariate(1.0 / kill_every_s)
    while torchrun.poll() is None:
        ranks = children_of(torchrun.pid)
        if due is not None and draw is not None and time.monotonic() >= due and ranks:
            whom = draw.choice(["a rank by SIGKILL", "a rank by SIGKILL", "torchrun by SIGTERM"])
            job.kills[whom] = job.kills.get(whom, 0) + 1
            is_rank = whom.startswith("a rank")
            victim = draw.choice(ranks) if is_rank else torchrun.pid
            with contextlib.suppress(ProcessLookupError):  # it was just about to end
                os.kill(victim, signal.SIGKILL if is_rank else signal.SIGTERM)
            torchrun.wait(timeout=120)
            return
        if len(ranks) == N_RANKS:
            job.memory_mib.append(max(map(memory_mib, ranks)))
            job.handles.append(max(map(n_handles, ranks)))
        time.sleep(_SAMPLE_S)


def children_of(pid: int) -> list[int]:
    """Return the ranks that a torchrun has started."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in text.split()]


def memory_mib(pid: int) -> float:
    """Return the resident set of a process; 0 if it has ended."""
    try:
        n_pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return n_pages * os.sysconf("SC_PAGE_SIZE") / 1024**2


def n_handles(pid: int) -> int:
    """Return how many files a process has open; 0 if it has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def ends(samples: list[float] | list[int]) -> tuple[float, float]:
    """Return the medians of the second and of the last quarter; the first one warms up."""
    quarter = max(1, len(samples) // 4)
    return statistics.median(samples[quarter : 2 * quarter] or samples), statistics.median(
        samples[-quarter:]
    )


def seconds_per_step(folder: Path, *, is_elastic: bool) -> float:
    """Return what a step takes, from a short run."""
    train(folder, _CALIBRATION_STEPS, None, 0.0, is_elastic=is_elastic)
    (run,) = (folder / "tb").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    return float(summary["seconds"]) / _CALIBRATION_STEPS


def main(arguments: Sequence[str]) -> int:
    """Read the command line and do what it says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("output", type=new_folder, metavar="OUTPUT", help="folder for both runs; emptied")
    minutes, seconds = (number(0.0, most, above=True) for most in (1e5, 1e6))
    add("--minutes", type=minutes, default=60.0, help="about how long it may take")
    add("--kill-every", type=seconds, default=45.0, help="mean seconds between kills")
    add("--elastic", action="store_true", help="a pipeline that shrinks; kills in its moves too")
    add("--seed", type=whole(0, 2**64 - 1), default=0, help="of the kills")
    return soak(parser.parse_args(arguments))


def soak(given: argparse.Namespace) -> int:
    """Run both, print the table and return the exit status."""
    shrinks = {"is_elastic": given.elastic}
    step_s = seconds_per_step(given.output / "calibration", **shrinks)
    n_steps = max(_CALIBRATION_STEPS, int(_FRACTION_IN_PEACE * 60.0 * given.minutes / step_s))
    print(f"{n_steps} steps of about {1e3 * step_s:.0f} ms", flush=True)
    peace = train(given.output / "in_peace", n_steps, None, 0.0, **shrinks)
    draw = random.Random(given.seed)
    killed = train(given.output / "killed", n_steps, draw, given.kill_every, **shrinks)
    is_equal = equal_weights(given.output / "in_peace", given.output / "killed", N_RANKS)
    memory, handles = ends(peace.memory_mib), ends(peace.handles)
    kills = ", ".join(f"{n} x {whom}" for whom, n in sorted(killed.kills.items())) or "none"
    rows = [
        ("", "in peace", "killed"),
        ("steps", n_steps, n_steps),
        ("seconds", f"{peace.seconds:.0f}", f"{killed.seconds:.0f}"),
        ("starts", peace.starts, killed.starts),
        ("killed", "none", kills),
        ("processes left behind", peace.left_behind, killed.left_behind),
        ("largest rank, MiB, second and last quarter", f"{memory[0]:.1f}, {memory[1]:.1f}", ""),
        ("most file handles, second and last quarter", f"{handles[0]:g}, {handles[1]:g}", ""),
        ("final weights", "", "equal" if is_equal else "DIFFERENT"),
    ]
    header, *lines = [[str(cell) for cell in row] for row in rows]
    print(markdown_table(header, lines))
    # A shorter pipeline has more on each rank, and groups of its own.
    is_level = given.elastic or (
        memory[1] <= (1.0 + _MAX_GROWTH) * memory[0] and handles[1] <= handles[0] + _MAX_NEW_HANDLES
    )
    return 0 if is_equal and is_level and not peace.left_behind + killed.left_behind else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
