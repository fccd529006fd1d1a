"""Two launchers, as two hosts start them: they train as one does, are late, die, or are alone.

Those of the first test are forked; the long tests start them as the guide says.
"""

import csv
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher import ROOT, arguments, forked_torchrun, forked_torchruns

SETTINGS = {
    "model__flavor": "debugmodel",  # which is no test's
    "parallelism__pipeline_parallel_degree": 2,
    "freezing__method": "fixed",
    "freezing__last_warmup_step": 2,
    "freezing__fixed__layers": 2,
    "training__steps": 5,
}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])


def launcher_words(folder, n_processes, *launcher):
    return [
        f"--nproc_per_node={n_processes}", *launcher,
        "-m", "torchtitan.freezing", *arguments(**SETTINGS), f"--job.dump_folder={folder}",
    ]  # fmt: skip


def start_node(folder, node, port, *options, **settings):
    """Start a node of two as the guide says."""
    command = [
        sys.executable, "-m", "timelyfreeze", "train", "train_configs/tiny_8m.toml", "--nproc=1",
        *arguments(**{**SETTINGS, **settings}), f"--job.dump_folder={folder}",
    ]  # fmt: skip
    torchrun = [
        "--nnodes=2", f"--node_rank={node}", "--master_addr=localhost", f"--master_port={port}",
        *options,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHRUN_ARGS": " ".join(torchrun)}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def losses(folder):
    (file,) = folder.glob("tb/*/losses.csv")
    return [(row["step"], row["train_loss"]) for row in csv.DictReader(file.open())]


@pytest.mark.timeout(240)
def test_two_launchers_train_as_one(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    alone = launcher_words(one, 2, "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0")
    status, said, errors = forked_torchrun(*alone)
    assert status == 0, said[-3000:] + errors[-3000:]
    meet = ("--nnodes=2", "--master_addr=localhost", f"--master_port={free_port()}")
    both = [launcher_words(two, 1, *meet, f"--node_rank={node}") for node in (0, 1)]
    status, said, errors = forked_torchruns(*both)
    assert status == 0, said[-3000:] + errors[-3000:]
    assert len(losses(two)) == 5
    assert losses(two) == losses(one)
    assert said.count("Run report") == 1, "one process talks"


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_node_that_is_late_is_waited_for(tmp_path):
    port = free_port()
    first = start_node(tmp_path, 0, port)
    time.sleep(8)
    both = [first, start_node(tmp_path, 1, port)]
    try:
        outputs = [process.communicate(timeout=110)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], outputs[0][-2000:]
    assert f"Node 0 of 2 waits for the others at localhost:{port}, 900 s at most" in outputs[0]
    assert len(losses(tmp_path)) == 5


@pytest.mark.long
@pytest.mark.timeout(90)
@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_waits_in_vain_says_where(tmp_path, node):
    port = free_port()
    alone = start_node(tmp_path, node, port, "--rdzv_conf=timeout=3")
    try:
        said, _ = alone.communicate(timeout=80)
    finally:
        alone.kill()
    assert alone.returncode == 1
    last = said.splitlines()[-1]
    assert last.startswith(
        f"error: Node {node} of 2 did not meet the others, or lost them, at localhost:{port}, 3 s "
    ), said[-2000:]
    assert "Traceback" not in said


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_node_that_dies_ends_the_other_at_once(tmp_path):
    port = free_port()
    both = [start_node(tmp_path, node, port, training__steps=10**6) for node in (0, 1)]
    try:
        limit = time.monotonic() + 110
        while not (files := list(tmp_path.glob("tb/*/losses.csv"))) or len(losses(tmp_path)) < 2:
            assert time.monotonic() < limit, files
            assert both[0].poll() is None
            time.sleep(0.5)
        launcher = both[1].pid
        ranks = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        for process in (launcher, *map(int, ranks)):
            os.kill(process, signal.SIGKILL)
        # Of ranks on CPUs the connection tells; 30 s more are torchrun's to end what is left.
        said, _ = both[0].communicate(timeout=60)
    finally:
        for process in both:
            process.kill()
    assert both[0].returncode == 1
    assert "Rank 0 ends in step" in said
    assert "another rank died or hung before" in said
