"""Batches in turns: what is started, what is kept, and the table."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import prediction_turns
import pytest
from prediction_turns import TABLE, main
from turn_times import BATCHES

from tests.benchmarks.turns import CAP, batches_text, status_of

SLOW_UNDER_THE_PLAN = {"nothing": [1.0, 1.0], "everything": [1.0, 1.0], CAP: [1.5, 1.5]}


class Starter:
    """Stands in for torchrun: writes what a worker writes."""

    def __init__(self, status: int = 0) -> None:
        self.tasks: list[dict] = []
        self.commands: list[Sequence[str]] = []
        self.status = status

    def __call__(self, command: Sequence[str], variables: Mapping[str, str], log: Path) -> int:
        task = json.loads(command[-1])
        self.commands.append(command)
        self.tasks.append(task)
        assert variables["OMP_NUM_THREADS"] == "1"
        if self.status == 0:
            text = batches_text(
                SLOW_UNDER_THE_PLAN, pipeline=task["pipeline"], schedule=task["schedule"]
            )
            (Path(task["folder"]) / BATCHES).write_text(text)
        return self.status


@pytest.fixture(autouse=True)
def _one_thread_and_few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(prediction_turns, "N_SAMPLES", 3)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.touch()
    return path


def run(config: Path, output: Path, *more: str, starter: Starter) -> int:
    return main(["run", str(config), str(output), *more], starter=starter)


def test_each_pipeline_runs_each_schedule_once(config: Path, tmp_path: Path) -> None:
    starter, output = Starter(), tmp_path / "out"
    more = ("--schedules", "GPipe", "1F1B", "--r-max", "0.5", "--", "--training.seed=3")
    assert run(config, output, *more, starter=starter) == 0
    assert [(task["schedule"], task["pipeline"]) for task in starter.tasks] == [
        ("GPipe", "emulated:4"),
        ("GPipe", "real:2"),
        ("1F1B", "emulated:4"),
        ("1F1B", "real:2"),
    ]
    assert all(task["trainer"] == ["--training.seed=3"] for task in starter.tasks)
    processes = [c for command in starter.commands for c in command if "nproc" in c]
    assert processes == ["--nproc_per_node=1", "--nproc_per_node=2"] * 2
    again = Starter()
    assert run(config, output, *more, starter=again) == 0
    assert again.tasks == [], "what is there is not run again"


def test_the_table_has_errors_at_equal_speed_and_as_measured(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    more = ("--schedules", "1F1B", "--pipelines", "real:2", "--r-max", "0.5")
    run(config, tmp_path / "out", *more, starter=Starter())
    text = (tmp_path / "out" / TABLE).read_text()
    assert text in capsys.readouterr().out
    lines = [line for line in text.splitlines() if line.startswith("| real:2")]
    cells = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert cells[:4] == ["real:2", "1F1B", "0.5", "2"]
    assert cells[5:10] == ["9.0", "9.0", "+0.0%", "7.0", "7.0"]
    assert cells[10] == "+0.0% (+0.0%..+0.0%)"
    assert cells[12:] == [
        "+28.6%",
        "+26.7%",
        "+50.0%",
    ]  # 9 over 7; 9.5 over 7.5; half as slow again
    assert "| real:2 | batch with | 1 | 0.0% | +0.0% | 1 of 1 |" in lines


def test_a_run_that_fails_is_named_and_the_rest_is_tabled(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert run(config, tmp_path, "--schedules", "GPipe", starter=Starter(1)) == 2
    assert "train.log" in capsys.readouterr().err
    run(config, tmp_path, "--schedules", "1F1B", starter=Starter())
    assert run(config, tmp_path, "--schedules", "GPipe", starter=Starter(1)) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batches", "1"], "--batches: '1' is given"),
        (["--rounds", "0"], "--rounds: '0' is given"),
        (["--pipelines", "real:1"], "real:1"),
    ],
)
def test_errors_are_refused_before_anything_runs(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture, arguments: list, message: str
) -> None:
    starter = Starter()
    assert status_of(lambda: run(config, tmp_path, *arguments, starter=starter)) == 2
    assert message in capsys.readouterr().err
    assert starter.tasks == []


def test_an_empty_folder_and_a_missing_config_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["table", str(tmp_path)]) == 2
    assert BATCHES in capsys.readouterr().err
    assert run(tmp_path / "none.toml", tmp_path, starter=Starter()) == 2
    assert "none.toml" in capsys.readouterr().err
