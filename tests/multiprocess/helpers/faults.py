"""Starts runs that something happens to, and looks at what they leave."""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from launcher import ROOT, arguments, ask_fork_server
from methods import ROWS, STEPS

(TIMELYFREEZE,) = [row for row in ROWS if row.method == "timelyfreeze"]
# A checkpoint every three steps; 13 steps, of which 2 accumulate 2 batches each.
SETTINGS = {
    "model__flavor": "short",
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
    _, _, _, *words = command_of(fault, folder, n_processes=n_processes, **settings)
    mark = str(folder.resolve() / "fault.json")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: mark}
    request = {"torchrun": words, "environment": environment}
    # Not into a file, whose size a fault may limit.
    output = folder / "output"
    os.mkfifo(output)
    try:
        server = ask_fork_server(request, output, mark, timeout_s)
        said = output.read_text()
        status = int(server.stdout.readline())
        left = processes_left(mark, wait_s=40.0)
    finally:
        output.unlink()
        for pid in processes_left(mark, wait_s=0.0):
            os.kill(pid, signal.SIGKILL)
    return Ended(status, said, left)


def processes_left(mark, wait_s):
    """Return the processes of a run that have not ended after so many seconds.

    They have ``mark`` in their environment; those that were forked have the file of that name open.
    """
    deadline = time.monotonic() + wait_s
    while True:
        left = [int(p.name) for p in Path("/proc").glob("[0-9]*") if _has(p, mark)]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.2)


def _has(process, mark):
    try:
        if f"{MARK}={mark}".encode() in (process / "environ").read_bytes():
            return True
        return any(_target(file) == mark for file in (process / "fd").iterdir())
    except OSError:
        return False  # it has ended, or is another user's


def _target(link):
    try:
        return os.readlink(link)
    except OSError:
        return None  # closed meanwhile


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
