"""Arguments of shell scripts: wrong ones end with status 2 before the environment is even made."""

import argparse
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from torchtitan.evaluation import command as evaluate
from torchtitan.freezing.memory import command as estimate_memory
from torchtitan.freezing.profile import command as profile

ROOT = Path(__file__).resolve().parents[2]
STARTED = 77


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A copy of all scripts; the one that makes the environment says that it was reached."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("*.py"))
    shutil.copy(ROOT / "run_train.sh", tmp_path)
    (tmp_path / "scripts/setup.sh").write_text(f"#!/bin/sh\necho started >&2\nexit {STARTED}\n")
    (tmp_path / "train_configs").mkdir()
    for name in ("train_configs/tiny_8m.toml", "a_file"):
        (tmp_path / name).write_text("")
    (tmp_path / "a_folder").mkdir()
    return tmp_path


def run(place: Path, script: str, *arguments: str, **variables: str) -> tuple[int, str]:
    done = subprocess.run(
        ["bash", f"{place}/{script}", *arguments],
        cwd=place,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=20,
    )
    return done.returncode, done.stdout + done.stderr


# What is wrong, and what is said of it.
WRONG: list[tuple[str, list[str], str]] = [
    ("evaluate.sh", [], "RUN_OR_FOLDER is missing"),
    ("evaluate.sh", ["/no/such"], "RUN_OR_FOLDER is '/no/such', which is no folder"),
    ("evaluate.sh", ["a_folder", "--odd", "1"], "--odd is no option; known: --step"),
    ("evaluate.sh", ["--limit", "20"], "RUN_OR_FOLDER is missing: it comes first"),
    ("export_hf.sh", [], "RUN is missing"),
    ("export_hf.sh", ["a_file"], "RUN is 'a_file', which is no folder"),
    ("export_hf.sh", ["a_folder", "3", "--odd=1"], "--odd=1 is no option; known: --output"),
    ("estimate_memory.sh", [], "CONFIG.toml is missing"),
    ("estimate_memory.sh", ["a_folder"], "CONFIG.toml is 'a_folder', which is no file"),
    ("estimate_memory.sh", ["a_file", "--odd"], "--odd is no option"),
    ("profile_stages.sh", [], "CONFIG.toml is missing"),
    ("profile_stages.sh", ["no.toml"], "CONFIG.toml is 'no.toml', which is no file"),
    ("profile_stages.sh", ["a_file", "--odd", "--", "--x"], "--odd is no option"),
    ("compare_small.sh", ["a_file", "a_file"], "BASE_ROWS, ROWS and OUTPUT are needed"),
    ("compare_small.sh", ["a_file", "no", "out"], "ROWS is 'no', which is no file"),
    ("compare_small.sh", ["a_file", "a_file", "a_file"], "OUTPUT is 'a_file', which is no folder"),
    ("make_gallery.sh", [], "OUTPUT is missing"),
    ("make_gallery.sh", ["--", "--x"], "OUTPUT is missing"),
    ("make_gallery.sh", ["a_file"], "a_file', which is no folder"),
    ("make_gallery.sh", ["out", "more"], "'more' follows OUTPUT"),
    ("make_gallery.sh", ["out", "--odd"], "--odd is no option"),
    ("gpu_checks.sh", ["--odd"], "'--odd' is no part and no option"),
    ("gpu_checks.sh", ["--model", "no", "--rows", "a_file"], "which is no folder"),
    ("gpu_checks.sh", ["--rows", "no"], "which is neither a file nor a folder"),
    ("gpu_checks.sh", ["--questions", "a_file"], "which is no folder"),
    ("gpu_checks.sh", ["--output", "a_file", "--small"], "which is no folder"),
    ("lint.sh", ["x"], "'x': it takes no argument"),
]


@pytest.mark.parametrize(("script", "arguments", "message"), WRONG)
def test_wrong_arguments_end_before_anything_starts(
    place: Path, script: str, arguments: list[str], message: str
) -> None:
    status, said = run(place, f"scripts/{script}", *arguments)
    assert status == 2, said
    assert "error: " in said
    assert message in said
    assert "started" not in said
    assert len(said) < 4000


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("scripts/evaluate.sh", ["a_folder", "--limit", "-1", "--dtype=x"]),
        ("scripts/export_hf.sh", ["a_folder", "3", "--dtype", "bfloat16"]),
        ("scripts/estimate_memory.sh", ["a_file", "--device-gib", "48", "--", "--model.flavor=x"]),
        ("scripts/profile_stages.sh", ["train_configs/tiny_8m.toml", "--repeats=1", "--", "--x"]),
        ("benchmarks/compare_small.sh", ["a_file", "a_file", "out", "--nproc", "2"]),
        ("benchmarks/make_gallery.sh", ["out", "--", "--training.steps=3"]),
        ("scripts/gpu_checks.sh", ["--small", "--output", "out", "tests"]),
        ("scripts/lint.sh", []),
        ("run_train.sh", ["--help"]),
    ],
)
def test_right_arguments_start(place: Path, script: str, arguments: list[str]) -> None:
    assert run(place, script, *arguments)[0] == STARTED


@pytest.mark.parametrize(
    "script",
    [
        *("evaluate", "export_hf", "estimate_memory", "profile_stages", "compare_small"),
        *("make_gallery", "gpu_checks", "lint", "setup"),
    ],
)
def test_usage_is_the_head_of_the_script(place: Path, script: str) -> None:
    shutil.copy(ROOT / "scripts/setup.sh", place / "scripts/setup.sh")
    head = (place / f"scripts/{script}.sh").read_text().splitlines()[1].removeprefix("# ")
    for flag in ("--help", "-h"):
        status, said = run(place, f"scripts/{script}.sh", flag)
        assert status == 0
        assert said.startswith(head)
        assert "set -euo" not in said


@pytest.mark.parametrize(
    ("arguments", "word"), [(["tests"], "'tests'"), (["dev", "eval"], "2 arg")]
)
def test_there_are_no_other_environments(place: Path, arguments: list[str], word: str) -> None:
    shutil.copy(ROOT / "scripts/setup.sh", place / "scripts/setup.sh")
    status, said = run(place, "scripts/setup.sh", *arguments)
    assert status == 2
    assert word in said
    assert not (place / ".venv").exists()


@pytest.mark.parametrize("n", ["0", "-1", "x", "1.5", "nan", "9" * 30, " "])
def test_a_number_of_processes_that_is_none_is_told(place: Path, n: str) -> None:
    status, said = run(place, "run_train.sh", NGPU=n)
    assert (status, f"NGPU is '{n}'" in said) == (2, True)
    assert run(place, "benchmarks/make_gallery.sh", "out", JOBS=n)[0] == 2


@pytest.mark.parametrize(
    ("script", "parser"),
    [
        ("evaluate.sh", evaluate._parser()),
        ("estimate_memory.sh", estimate_memory._parser()),
        ("profile_stages.sh", profile._parser()),
    ],
)
def test_a_script_knows_the_options_of_what_it_starts(
    script: str, parser: argparse.ArgumentParser
) -> None:
    text = (ROOT / "scripts" / script).read_text()
    known = re.findall(r'expect_options "([^"]*)"', text)[0].split()
    taken = [option for action in parser._actions for option in action.option_strings]
    assert {*known, "-h", "--help"} == set(taken)
