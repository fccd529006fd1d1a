"""What waits for GPUs runs through on a CPU, with a tiny model: nothing shall be missing there."""

import csv
import math
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from timelyfreeze.whatif.bounds_file import read_bounds_file

ROOT = Path(__file__).parents[2]
METHODS = ["none", "apf", "autofreeze", "timelyfreeze", "timelyfreeze+apf"]
METHODS += ["timelyfreeze+autofreeze"]
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"]
CONFIGS = ["paper_llama3_2_1b", "paper_llama3_8b"]
needs_environment = pytest.mark.skipif(
    not (ROOT / ".venv").exists(), reason="the script uses .venv, which scripts/setup.sh makes"
)


def gpu_checks(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts/gpu_checks.sh"), *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=2400,
    )


@needs_environment
@pytest.mark.long
@pytest.mark.timeout(2500)
def test_what_one_gpu_can_do(tmp_path: Path) -> None:
    done = gpu_checks(
        "--small",
        "--output",
        str(tmp_path),
        "paper_8b",
        "tests",
        "profile",
        "emulate",
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for config in CONFIGS:
        for schedule, n_stages in (("1F1B", 4), ("ZBVZeroBubble", 8)):
            file = read_bounds_file(tmp_path / "profile" / f"{config}_{schedule}" / "bounds.json")
            assert (file.n_ranks, file.n_stages, file.n_microbatches) == (4, n_stages, 8)
        table = (tmp_path / "profile" / f"{config}.md").read_text()
        assert [row.split(" | ")[:2] for row in table.splitlines()[5:]] == [
            [f"| {schedule}", method] for schedule in SCHEDULES for method in METHODS
        ]
    assert_paper_runs(done.stdout, tmp_path / "paper_1")
    assert done.stdout.count("emulated in one process") == 2, "estimates of two schedules"
    for schedule in ("1F1B", "ZBVZeroBubble"):
        assert_predicted(tmp_path / "emulate", schedule)


@needs_environment
@pytest.mark.long
@pytest.mark.timeout(2500)
def test_the_papers_smaller_model(tmp_path: Path) -> None:
    done = gpu_checks("--small", "--output", str(tmp_path), "paper_1b", "compiled")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert_paper_runs(done.stdout, tmp_path / "paper_4")
    assert_predicted(tmp_path / "compiled", "1F1B")


def assert_paper_runs(told: str, output: Path) -> None:
    rows = [line for line in told.splitlines() if " | timelyfreeze | " in line]
    assert any(row.startswith("| ZBVZeroBubble | timelyfreeze | ") for row in rows)
    assert_predicted(output / "defaults", "ZBVZeroBubble")


def assert_predicted(output: Path, schedule: str) -> None:
    """What is predicted was measured."""
    with (output / "comparison.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["schedule"] == schedule]
    (row,) = [row for row in rows if row["method"] == "timelyfreeze"]
    assert math.isfinite(float(row["batch_error_percent"]))


@needs_environment
@pytest.mark.multiprocess
@pytest.mark.long
@pytest.mark.timeout(2500)
def test_what_two_gpus_can_do(tmp_path: Path) -> None:
    done = gpu_checks("--small", "--output", str(tmp_path), "--gpus", "2", "pipeline", "memory")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert list((tmp_path / "default/tb").glob("*/summary.json"))
    assert "| timelyfreeze |" in (tmp_path / "comparison/comparison.md").read_text()
    assert '"peak_memory_gib"' in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["everything"], "'everything' is no part and no option"),
        (["--gpus", "1", "pipeline"], "pipeline needs 2 GPUs or more; 1 is visible"),
        (["--gpus", "some"], "--gpus is 'some'; it must be a number"),
        (["--gpus"], "--gpus needs a value"),
        (["--gpus", "2", "scores"], "scores needs --model, --examples and --questions"),
        (["--gpus", "1", "--model", "."], "--model is given and --examples is not"),
    ],
)
def test_an_error_is_told_before_anything_runs(arguments: list[str], message: str) -> None:
    done = gpu_checks(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="needs a machine without GPUs")
def test_a_machine_without_gpus_is_told_of_the_small_way() -> None:
    done = gpu_checks("profile")
    assert done.returncode == 2
    assert "no GPU is visible; --small tries everything without one" in done.stderr
