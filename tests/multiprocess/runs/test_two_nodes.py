"""A pipeline over two launchers, as two hosts start it, trains as one over a single launcher."""

import csv
import os
import socket
import subprocess
import sys

import pytest
from launcher import ROOT, arguments

SETTINGS = {
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


def start(folder, n_processes, *launcher):
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={n_processes}", *launcher,
        "-m", "torchtitan.freezing", *arguments(**SETTINGS), f"--job.dump_folder={folder}",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def losses(folder):
    (file,) = folder.glob("tb/*/losses.csv")
    return [(row["step"], row["train_loss"]) for row in csv.DictReader(file.open())]


@pytest.mark.long
@pytest.mark.timeout(240)
def test_two_launchers_train_as_one(tmp_path):
    one = start(tmp_path / "one", 2, "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0")
    said, _ = one.communicate(timeout=110)
    assert one.returncode == 0, said[-3000:]
    port = free_port()
    both = [
        start(
            tmp_path / "two", 1,
            "--nnodes=2", f"--node_rank={node}", "--master_addr=localhost", f"--master_port={port}",
        )
        for node in (0, 1)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=110)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], (
        outputs[0][-2000:] + outputs[1][-2000:]
    )
    assert len(losses(tmp_path / "two")) == 5
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    assert sum("Run report" in output for output in outputs) == 1, "one process talks"
