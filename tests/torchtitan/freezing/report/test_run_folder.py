import logging
import os
from pathlib import Path

import pytest

from tests.torchtitan.helpers.job_configs import put
from tests.torchtitan.helpers.report_runs import end_step, log_step, run_in
from torchtitan.freezing.report import run_folder
from torchtitan.freezing.report.losses import Losses
from torchtitan.freezing.report.run_folder import describe, make_run_folder, number_former
from torchtitan.settings.job_config import JobConfig


class Alone:
    """The words of one process with itself."""

    def all_gather(self, value: object) -> list[object]:
        return [None, value]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    """A run that starts in the same second as all others."""
    monkeypatch.setattr(run_folder, "Exchange", Alone)
    monkeypatch.setattr(run_folder, "describe", lambda config: "run")
    config = JobConfig()
    config.job.dump_folder, config.metrics.save_tb_folder = str(tmp_path), "tb"
    return config


def test_two_runs_of_one_moment_get_two_folders(
    tmp_path: Path, config: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_make, made = os.mkdir, []

    def after_another_run(path: Path, *mode: int) -> None:
        if not made and Path(path).name == "run":
            made.append(path)
            really_make(path, *mode)
        really_make(path, *mode)

    (tmp_path / "tb").mkdir()
    monkeypatch.setattr(os, "mkdir", after_another_run)
    folders = [make_run_folder(config, create=True).name for _ in range(3)]
    assert folders == ["run_2", "run_3", "run_4"], "the other run has the first"
    assert {path.name for path in (tmp_path / "tb").iterdir()} == {"run", *folders}


def test_a_place_that_takes_no_folder_ends_no_run(tmp_path: Path, config: JobConfig) -> None:
    (tmp_path / "tb").touch()
    assert make_run_folder(config, create=True) == tmp_path / "tb" / "run"


def test_name_says_what_ran():
    config = JobConfig()
    config.job.config_file = "somewhere/mine.toml"
    config.parallelism.pipeline_parallel_degree = 4
    config.parallelism.pipeline_parallel_schedule = "GPipe"
    put(config, "freezing", method="timelyfreeze")
    assert describe(config).endswith("_mine_GPipe_timelyfreeze")


def test_schedule_is_not_named_without_a_pipeline():
    assert "1F1B" not in describe(JobConfig())


def test_former_files_get_a_number_and_stay(tmp_path):
    names = ("bounds.json", "plan.json")
    number_former(tmp_path, names)
    assert list(tmp_path.iterdir()) == []
    for text in ("first", "second", "third"):
        number_former(tmp_path, names)
        for name in names:
            (tmp_path / name).write_text(text)
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert texts == {
        **{"bounds_1.json": "first", "bounds_2.json": "second", "bounds.json": "third"},
        **{"plan_1.json": "first", "plan_2.json": "second", "plan.json": "third"},
    }


def test_files_of_one_plan_fraction_a_number(tmp_path):
    (tmp_path / "plan_1.json").write_text("somebody's")
    for name in ("bounds.json", "plan.json"):
        (tmp_path / name).write_text("first")
    number_former(tmp_path, ("bounds.json", "plan.json"))
    assert {path.name for path in tmp_path.iterdir()} == {
        *("plan_1.json", "plan_2.json", "bounds_2.json")
    }
    assert (tmp_path / "plan_1.json").read_text() == "somebody's"


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
def test_a_full_disk_is_told_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses = Losses(run_in(tmp_path))
    (tmp_path / "losses.csv").unlink()
    (tmp_path / "losses.csv").symlink_to(FULL)
    for step in (1, 2):
        log_step(losses, step, 2.0)
        end_step(losses, step, None, 1.0)
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert str(tmp_path) in record.getMessage()
    assert "No space left on device" in record.getMessage()


def test_what_is_not_the_file_systems_fault_is_not_swallowed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ours"), run_in(tmp_path).writing():
        raise ValueError("ours")
