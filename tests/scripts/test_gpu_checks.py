"""What waits for GPUs runs through on a CPU, with a tiny model: nothing shall be missing there."""

import csv
import math
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from torch.distributed import pipelining

from timelyfreeze.whatif.bounds_file import read_bounds_file

ROOT = Path(__file__).parents[2]
METHODS = ["none", "apf", "autofreeze", "timelyfreeze", "timelyfreeze+apf"]
METHODS += ["timelyfreeze+autofreeze"]
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"]
CONFIGS = ["paper_llama3_2_1b", "paper_llama3_8b"]
needs_environment = pytest.mark.skipif(
    not (ROOT / ".venv").exists(), reason="the script uses .venv, which scripts/setup.sh makes"
)


def gpu_checks(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts/gpu_checks.sh"), *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **variables},
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
    done = gpu_checks("--small", "--output", str(tmp_path), "paper_1b")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert_paper_runs(done.stdout, tmp_path / "paper_4")


@needs_environment
@pytest.mark.long
@pytest.mark.timeout(2500)
def test_the_short_part(tmp_path: Path) -> None:
    done = gpu_checks("--small", "--output", str(tmp_path), "short")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    parts = done.stdout.split("== short: ")[1:]
    names = ["probe", "runs_8b", "runs_1b", "tests", "compiled"]
    assert [part.splitlines()[0] for part in parts] == names
    assert "| 8M, 2 | LoRA |" in parts[0]
    for part, methods in ((1, "none timelyfreeze lora"), (2, "none timelyfreeze lora")):
        rows = [line.split(" | ") for line in parts[part].splitlines() if line.startswith("| ")]
        assert [row[0].strip("| ") for row in rows[2:]] == methods.split()
        step, batch, predicted = (float(cell.replace(",", "")) for cell in rows[3][1:4])
        assert min(step, batch, predicted) > 0.0


@pytest.mark.long
@pytest.mark.timeout(2500)
def test_without_a_network_what_is_carried_is_used(tmp_path: Path) -> None:
    """A wheel, and torch's folder with a line more, neither of which the environment gets."""
    wheels = tmp_path / "wheels"
    shutil.copytree(Path(pipelining.__file__).parent, wheels / "pipelining")
    with (wheels / "pipelining/__init__.py").open("a") as file:
        file.write("\nimport carried_along\n")
    told = "carried_along-1.0.dist-info"
    with zipfile.ZipFile(wheels / "carried_along-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried_along.py", 'print("carried along")\n')
        wheel.writestr(
            f"{told}/METADATA", "Metadata-Version: 2.1\nName: carried-along\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{told}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{told}/RECORD", "")
    variables = {"TIMELYFREEZE_PYTHON": sys.executable, "PIP_INDEX_URL": "http://127.0.0.1:9"}
    options = ("--small", "--wheels", str(wheels), "--output", str(tmp_path / "out"), "probe")
    done = gpu_checks(*options, **variables)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "carried along\n" in done.stdout
    assert "| 8M, 2 | exact |" in done.stdout


def test_a_piece_that_fails_does_not_keep_others_from_running(tmp_path: Path) -> None:
    """A Python that fails, and says what it was asked for."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" != -c ] || exit 0\necho "asked: $*"\nexit 3\n')
    python.chmod(0o755)
    options = ("--small", "--output", str(tmp_path / "out"), "short")
    done = gpu_checks(*options, TIMELYFREEZE_PYTHON=str(python))
    assert done.returncode == 1
    assert done.stdout.count("status 3") == 5
    assert done.stdout.count("asked: ") == 5


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
    done = gpu_checks(
        "--small", "--output", str(tmp_path), "--gpus", "2", "pipeline", "real", "memory"
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for config in CONFIGS:
        assert_predicted(tmp_path / "real" / config, "1F1B")
    assert done.stdout.count("FSDP2 alone:\n") == len(CONFIGS)
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
