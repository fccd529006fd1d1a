"""Starts runs that something happens to, and looks at what they leave."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch
from launcher import ROOT, arguments
from methods import ROWS, STEPS

(TIMELYFREEZE,) = [row for row in ROWS if row.method == "timelyfreeze"]
# A checkpoint every three steps; 13 steps, of which 2 accumulate 2 batches each.
SETTINGS = {
    "model__flavor": "tiny",
    "parallelism__pipeline_parallel_degree": 2,
    "parallelism__pipeline_parallel_microbatch_size": 2,
    "training__steps": STEPS,
    "training__global_batch_size": 16,
    "checkpoint__enable": None,
    "checkpoint__interval": 3,
    "checkpoint__keep_latest_k": 0,
    "checkpoint__no_last_save_model_only": None,
    **TIMELYFREEZE.arguments,
}
MARK = "TIMELYFREEZE_TEST_RUN"


@dataclass(frozen=True)
class Ended:
    """A run that has ended.

    Attributes:
        status: Exit status of torchrun.
        output: What all of its processes printed.
        left: Its processes that were still there a moment later.
    """

    status: int
    output: str
    left: list[int]

    def lines(self, *words):
        """The lines in which all of ``words`` stand."""
        return [ln for ln in self.output.splitlines() if all(word in ln for word in words)]


def command_of(fault, folder, *, n_processes=2, **settings):
    """Return the command of a run in ``folder`` to which ``fault`` happens; False unsets a key."""
    (folder / "fault.json").write_text(json.dumps(fault))
    settings = {**SETTINGS, "job__dump_folder": folder, **settings}
    return [
        sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={n_processes}",
        "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0",
        str(ROOT / "tests/multiprocess/helpers/faulty_run.py"), str(folder / "fault.json"),
        *arguments(**{k: v for k, v in settings.items() if v is not False}),
    ]  # fmt: skip


def run_with(fault, folder, *, n_processes=2, timeout_s=240, **settings):
    """Start a run in ``folder``, have ``fault`` happen to it and wait for its end."""
    folder.mkdir(parents=True, exist_ok=True)
    command = command_of(fault, folder, n_processes=n_processes, **settings)
    mark = uuid.uuid4().hex
    environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: mark}
    # Not into a file, whose size a fault may limit.
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as torchrun:
        try:
            output, _ = torchrun.communicate(timeout=timeout_s)
            left = processes_left(mark, wait_s=40.0)
        finally:
            for pid in processes_left(mark, wait_s=0.0):
                os.kill(pid, signal.SIGKILL)
    return Ended(torchrun.returncode, output, left)


def processes_left(mark, wait_s):
    """Return the processes of a run that have not ended after so many seconds."""
    deadline = time.monotonic() + wait_s
    while True:
        left = [int(p.parent.name) for p in Path("/proc").glob("[0-9]*/environ") if _has(p, mark)]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.2)


def _has(environ, mark):
    try:
        return f"{MARK}={mark}".encode() in environ.read_bytes()
    except OSError:
        return False  # it has ended, or is another user's


def final_weights(folder, n_processes=2):
    """Return the weights that a run came to, by name."""
    together = {}
    for rank in range(n_processes):
        together.update(torch.load(folder / f"weights_{rank}.pt", weights_only=True))
    return together


def equal_weights(left, right, n_processes=2):
    """Return whether two runs came to the same weights, bit for bit."""
    mine, theirs = final_weights(left, n_processes), final_weights(right, n_processes)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in theirs)


def last_run_file(folder, name):
    """Return the text of a file of the last run in ``folder``."""
    return (max((folder / "tb").iterdir()) / name).read_text()
