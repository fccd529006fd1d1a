"""scripts/release.sh in a copy of the project: all but the upload, which it leaves to a person."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    copied = tmp_path / "project"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "timelyfreeze", "torchtitan", "scripts", ":(glob)*"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        (copied / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copied / name)
    git(copied, "init", "-q")
    commit(copied)
    return copied


def git(place: Path, *words: str) -> None:
    person = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    subprocess.run(["git", *person, *words], cwd=place, check=True)


def commit(place: Path) -> None:
    git(place, "add", "--all")
    git(place, "commit", "-qm", "all")


def release(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["scripts/release.sh", *words],
        cwd=place, env={**os.environ, "TIMELYFREEZE_PYTHON": sys.executable},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_release_stops_before_the_upload(place: Path) -> None:
    log = (place / "CHANGELOG.md").read_text()
    (place / "CHANGELOG.md").write_text(
        re.sub(r"^## \[.*", "## [7.8.9] - unreleased", log, count=1, flags=re.M)
    )
    commit(place)
    done = release(place, "7.8.9")
    assert done.returncode == 0, done.stderr
    (wheel,) = (place / "dist").glob("*.whl")
    assert wheel.name == "timelyfreeze-7.8.9-py3-none-any.whl"
    assert (place / "dist/SHA256SUMS").read_text() == (
        f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel.name}\n"
    )
    with zipfile.ZipFile(wheel) as packed:
        assert "timelyfreeze/api.py" in packed.namelist()
    assert tomllib.loads((place / "pyproject.toml").read_text())["project"]["version"] == "7.8.9"
    assert "\nversion: 7.8.9\n" in (place / "CITATION.cff").read_text()
    assert "cff-version: 1.2.0\n" in (place / "CITATION.cff").read_text()
    changelog = (place / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[7\.8\.9\] - \d{4}-\d\d-\d\d$", changelog, re.M)
    assert "git tag v7.8.9" in done.stdout


@pytest.mark.parametrize(
    ("words", "change", "told"),
    [
        ([], False, "0 arguments; it takes a version"),
        (["v1"], False, "VERSION is 'v1'; it must be three numbers"),
        (["7.8.9"], False, "CHANGELOG.md has no '## [7.8.9] - unreleased'"),
        (["0.1.0"], True, "the working tree has changes; commit them first"),
    ],
)
def test_what_is_no_release_is_refused(
    place: Path, words: list[str], change: bool, told: str
) -> None:
    if change:
        (place / "README.md").write_text("changed")
    done = release(place, *words)
    assert done.returncode == 2
    assert f"error: {told}" in done.stderr
    assert not (place / "dist").exists()
