"""scripts/test.sh tells a busy machine, at the start and at the end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(("cores", "times"), [("-1", 2), ("100000", 0)])
def test_a_load_above_the_cores_is_told_twice(tmp_path: Path, cores: str, times: int) -> None:
    nproc = tmp_path / "nproc"
    nproc.write_text(f"#!/bin/sh\necho {cores}\n")
    nproc.chmod(0o755)
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TIMELYFREEZE_PYTHON": sys.executable}
    # pytest itself is not what is looked at: an option that only prints.
    done = subprocess.run(
        ["scripts/test.sh", "unit", "--version"],
        cwd=ROOT, env={**os.environ, **paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    told = [line for line in lines if line.startswith("This machine is busy: a load of ")]
    assert len(told) == times
    if times:
        assert told[0] in lines[:2]
        assert lines[-1].endswith(" on -1 cores. Tests may take three times as long.")
