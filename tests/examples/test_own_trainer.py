"""The example of a trainer of one's own, in processes of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ["--steps=26", "--layers=1", "--width=16", "--microbatches=4"]

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]


def run(*arguments: str) -> str:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
        "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0",
        "examples/own_trainer.py", *SMALL, *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    "schedule", [pytest.param("1F1B", marks=[pytest.mark.long]), "ZBVZeroBubble"]
)
def test_it_trains_plans_and_reports(schedule: str) -> None:
    told = run(f"--schedule={schedule}")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", told)]
    assert losses[-1] < losses[0]
    assert "TimelyFreeze, step 26, phase stable" in told
    for line in ("batch measured", "batch predicted", "planned ratios", "applied ratios"):
        assert line in told
    assert "not measured" not in told


@pytest.mark.long
def test_it_takes_a_policy() -> None:
    told = run("--schedule=Interleaved1F1B", "--method=apf")
    assert "TimelyFreeze, step 26, phase stable" in told
    assert "batch predicted" not in told
