"""Arguments of shell scripts: wrong ones end with status 2 before the environment is even made."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STARTED = 77
# Nothing is activated.
CLEAN = {
    k: v
    for k, v in os.environ.items()
    if k not in ("VIRTUAL_ENV", "CONDA_PREFIX", "TIMELYFREEZE_PYTHON")
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A copy of all scripts; the one that makes the environment says that it was reached."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("*.py"))
    (tmp_path / "benchmarks").mkdir()
    for script in (ROOT / "benchmarks").glob("*.sh"):
        shutil.copy(script, tmp_path / "benchmarks")
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
        env={**CLEAN, **variables},
        capture_output=True,
        text=True,
        timeout=20,
    )
    return done.returncode, done.stdout + done.stderr


# What is wrong, and what is said of it.
WRONG: list[tuple[str, list[str], str]] = [
    (
        "benchmarks/compare_small.sh",
        ["a_file", "a_file"],
        "BASE_EXAMPLES, EXAMPLES and OUTPUT are needed",
    ),
    ("benchmarks/compare_small.sh", ["a_file", "no", "out"], "EXAMPLES is 'no', which is no file"),
    (
        "benchmarks/compare_small.sh",
        ["a_file", "a_file", "a_file"],
        "OUTPUT is 'a_file', which is no folder",
    ),
    ("benchmarks/make_gallery.sh", [], "OUTPUT is missing"),
    ("benchmarks/make_gallery.sh", ["--", "--x"], "OUTPUT is missing"),
    ("benchmarks/make_gallery.sh", ["a_file"], "a_file', which is no folder"),
    ("benchmarks/make_gallery.sh", ["out", "more"], "'more' follows OUTPUT"),
    ("benchmarks/make_gallery.sh", ["out", "--odd"], "--odd is no option"),
    ("scripts/gpu_checks.sh", ["--odd"], "'--odd' is no part and no option"),
    ("scripts/gpu_checks.sh", ["--model", "no", "--examples", "a_file"], "which is no folder"),
    ("scripts/gpu_checks.sh", ["--examples", "no"], "which is neither a file nor a folder"),
    ("scripts/gpu_checks.sh", ["--questions", "a_file"], "which is no folder"),
    ("scripts/gpu_checks.sh", ["--output", "a_file", "--small"], "which is no folder"),
    ("scripts/gpu_checks.sh", ["--wheels", "a_file"], "--wheels is"),
    ("scripts/gpu_checks.sh", ["--tree", "no"], "--tree is"),
    ("scripts/lint.sh", ["x"], "'x': it takes no argument"),
    ("scripts/mutants.sh", ["lp.py", "--odd"], "--odd is no option"),
    ("scripts/test_torch.sh", [], "VERSION is missing"),
    ("scripts/test_torch.sh", ["2.15"], "VERSION is '2.15', which is no release"),
    ("scripts/test_torch.sh", ["2.15.0", "a_folder", "more"], "'more' follows FOLDER"),
    ("scripts/test_torch.sh", ["--odd"], "--odd is no option"),
    ("scripts/test_hosts.sh", ["megatron"], "'megatron' is neither titan nor automodel"),
    ("scripts/test_hosts.sh", ["--odd"], "--odd is no option"),
]


@pytest.mark.parametrize(("script", "arguments", "message"), WRONG)
def test_wrong_arguments_end_before_anything_starts(
    place: Path, script: str, arguments: list[str], message: str
) -> None:
    status, said = run(place, script, *arguments)
    assert status == 2, said
    assert "error: " in said
    assert message in said
    assert "started" not in said
    assert len(said) < 4000


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("benchmarks/compare_small.sh", ["a_file", "a_file", "out", "--nproc", "2"]),
        ("benchmarks/make_gallery.sh", ["out", "--", "--training.steps=3"]),
        ("scripts/gpu_checks.sh", ["--small", "--output", "out", "tests"]),
        ("scripts/lint.sh", []),
        ("scripts/mutants.sh", ["lp.py"]),
        ("run_train.sh", ["--help"]),
    ],
)
def test_right_arguments_start(place: Path, script: str, arguments: list[str]) -> None:
    assert run(place, script, *arguments)[0] == STARTED


@pytest.mark.parametrize(
    "script",
    [
        "benchmarks/compare_small",
        "benchmarks/make_gallery",
        "scripts/gpu_checks",
        "scripts/lint",
        "scripts/mutants",
        "scripts/setup",
        "scripts/test_torch",
    ],
)
def test_usage_is_the_head_of_the_script(place: Path, script: str) -> None:
    shutil.copy(ROOT / "scripts/setup.sh", place / "scripts/setup.sh")
    head = (place / f"{script}.sh").read_text().splitlines()[1].removeprefix("# ")
    for flag in ("--help", "-h"):
        status, said = run(place, f"{script}.sh", flag)
        assert status == 0
        assert said.startswith(head)
        assert "set -euo" not in said


@pytest.mark.parametrize("arguments", [["tests"], ["dev", "tests"]])
def test_there_are_no_other_environments(place: Path, arguments: list[str]) -> None:
    shutil.copy(ROOT / "scripts/setup.sh", place / "scripts/setup.sh")
    status, said = run(place, "scripts/setup.sh", *arguments)
    assert status == 2
    assert "'tests'" in said
    assert not (place / ".venv").exists()


@pytest.mark.parametrize("n", ["0", "-1", "x", "1.5", "nan", "9" * 30, " "])
def test_a_number_of_jobs_that_is_none_is_told(place: Path, n: str) -> None:
    assert run(place, "benchmarks/make_gallery.sh", "out", JOBS=n)[0] == 2


def activated(place: Path, has_project: bool) -> Path:
    """An environment that is activated: its Python says whether it has the project."""
    python = place / "own/bin/python"
    python.parent.mkdir(parents=True)
    # Asked whether it has something, it answers; asked to run the project, it says that it was.
    python.write_text(f'#!/bin/sh\n[ "$1" != -c ] || exit {int(not has_project)}\necho "own $*"\n')
    python.chmod(0o755)
    return python


def test_a_python_of_ones_own_is_taken_and_nothing_is_made(place: Path) -> None:
    python = activated(place, has_project=True)
    status, said = run(place, "run_train.sh", "--a.b=c", TIMELYFREEZE_PYTHON=str(python))
    config = place / "train_configs/tiny_8m.toml"
    assert (status, said) == (0, f"own -m timelyfreeze train {config} --a.b=c\n")
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        status, said = run(place, "run_train.sh", **{variable: str(place / "own")})
        assert (status, said.split()[0]) == (0, "own")


def test_an_environment_without_the_project_is_not_taken(place: Path) -> None:
    python = activated(place, has_project=False)
    assert run(place, "run_train.sh", VIRTUAL_ENV=str(place / "own"))[0] == STARTED
    status, said = run(place, "run_train.sh", TIMELYFREEZE_PYTHON=str(python))
    assert status == 2
    assert f"TIMELYFREEZE_PYTHON is '{python}'; it must be a Python that has torch" in said


# Installs for as long as it takes a second host to come; it must not begin before the first ends.
SLOW_PIP = """#!/bin/sh
case "$*" in
  "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  *"pip install"*) echo begin >> log; sleep 2; echo end >> log ;;
esac
"""


def test_an_environment_is_made_again_for_what_it_lacks_alone(place: Path) -> None:
    shutil.copy(ROOT / "scripts/setup.sh", place / "scripts/setup.sh")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, place)
    (place / "python").write_text(SLOW_PIP.replace("sleep 2", 'echo "$*"'))
    (place / "python").chmod(0o755)
    made = []
    for extras in (["dev", "eval"], ["eval"], [], ["lora", "dev"]):
        assert run(place, "scripts/setup.sh", *extras, PYTHON=str(place / "python"))[0] == 0
        made.append((place / "log").read_text().count("begin"))
    assert made == [1, 1, 1, 2]


def test_two_hosts_that_start_at_once_make_the_environment_once(place: Path) -> None:
    shutil.copy(ROOT / "scripts/setup.sh", place / "scripts/setup.sh")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, place)
    (place / "python").write_text(SLOW_PIP)
    (place / "python").chmod(0o755)
    hosts = [
        subprocess.Popen(
            ["bash", "scripts/setup.sh"],
            cwd=place,
            env={**os.environ, "PYTHON": str(place / "python")},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [host.communicate(timeout=60)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0]
    assert (place / "log").read_text().split() == ["begin", "end"]
    assert sum("Waiting for another process" in text for text in said) == 1
