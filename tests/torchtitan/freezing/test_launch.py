"""What each process says of a command line that cannot be used; nothing starts here."""

import errno
import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchtitan.models.llama3 import Transformer
from torchtitan.models.llama3.model.args import TransformerModelArgs

from tests.torchtitan.helpers.job_configs import make_job_config
from timelyfreeze.files import write_whole
from torchtitan.checkpoints.finished import save_settings
from torchtitan.freezing import launch as launch_module
from torchtitan.freezing.checks import ConfigError
from torchtitan.freezing.launch import hold_checkpoints, launch
from torchtitan.hf.flavors import EXTRA_FLAVORS
from torchtitan.images.sources import ImageError
from torchtitan.settings import JobConfig

# Wrong for the parser, which prints by itself; wrong for our checks, which raise.
MISTAKES = ["--job.unknown=1", "--training.steps=x", "--model.vocab_size=0"]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waited: list[float] = []
    monkeypatch.setattr(launch_module.time, "sleep", waited.append)
    monkeypatch.setattr(launch_module, "end_with_parent", lambda *_: None)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    return waited


def said(capfd: pytest.CaptureFixture[str]) -> str:
    printed = capfd.readouterr()
    return printed.out + printed.err


@pytest.mark.slow
@pytest.mark.parametrize("error", MISTAKES)
def test_an_error_is_told_by_the_first_process_alone(
    capfd: pytest.CaptureFixture[str], waits: list[float], error: str
) -> None:
    assert launch([error], local_rank=0) == 2
    assert error.lstrip("-").split("=")[0] in said(capfd)
    assert launch([error], local_rank=1) == 2
    assert said(capfd) == ""
    assert waits == [], "without torchrun nobody would end it"


@pytest.mark.slow
@pytest.mark.parametrize("error", MISTAKES)
def test_under_torchrun_others_wait_for_the_first_and_tell_what_it_did_not(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    waits: list[float],
    error: str,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")

    def ended(seconds: float) -> None:
        raise InterruptedError

    monkeypatch.setattr(launch_module.time, "sleep", ended)
    with pytest.raises(InterruptedError):
        launch([error], local_rank=1)
    assert said(capfd) == "", "torchrun ends it before it says anything"
    monkeypatch.setattr(launch_module.time, "sleep", waits.append)
    assert launch([error], local_rank=1) == 2
    assert error.lstrip("-").split("=")[0] in said(capfd)
    assert launch([error], local_rank=0) == 2
    assert len(waits) == 1, "the first does not wait"


@pytest.mark.parametrize(("local_rank", "count"), [(0, 1), (1, 0)])
def test_what_checks_warn_of_is_told_by_the_first_process_alone(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    waits: list[float],
    local_rank: int,
    count: int,
) -> None:
    """There is no log yet, so that warnings go to the error output of each process."""

    def warns(job_config: JobConfig) -> None:
        assert logging.lastResort is not None
        logging.lastResort.handle(logging.makeLogRecord({"msg": "beware", "levelno": 30}))

    def refuses(job_config: JobConfig) -> None:
        raise ConfigError("enough")

    monkeypatch.setattr(launch_module, "prepare", lambda args: make_job_config())
    monkeypatch.setattr(launch_module, "is_done", lambda job_config: False)
    monkeypatch.setattr(launch_module, "check_data", warns)
    monkeypatch.setattr(launch_module, "hold_checkpoints", refuses)
    assert launch([], local_rank=local_rank) == 2
    assert capsys.readouterr().err.count("beware") == count


def test_help_is_printed_once_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], waits: list[float]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    assert launch(["--help"], local_rank=0) == 0
    assert "--freezing.method" in said(capfd)
    assert launch(["--help"], local_rank=3) == 0
    assert said(capfd) == ""
    assert waits == []


def test_a_damaged_picture_is_named_without_a_stack_trace(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], waits: list[float]
) -> None:
    """Found by reading, after the checks; the launch itself is that of any run."""
    import torchtitan.train as titan_train

    def broken(trainer: object) -> None:
        raise ImageError("pictures.parquet, row 7: is not a readable picture (cut off)")

    monkeypatch.setattr(launch_module, "prepare", lambda args: make_job_config())
    monkeypatch.setattr(launch_module, "trainer_for", lambda job_config: None)
    monkeypatch.setattr(titan_train, "ConfigManager", None)
    monkeypatch.setattr(titan_train, "main", broken)
    # In a whole suite the logger may have the stream of a test that has ended.
    monkeypatch.setattr(logging, "raiseExceptions", False)
    assert launch([], local_rank=0) == 2
    printed = said(capfd)
    assert "error: pictures.parquet, row 7: is not a readable picture (cut off)\n" in printed
    assert "Traceback" not in printed


def saving_in(folder: Path, name: str = "checkpoint", *, enable: bool = True) -> JobConfig:
    return make_job_config(
        job__dump_folder=str(folder), checkpoint__enable=enable, checkpoint__folder=name
    )


def test_two_runs_do_not_save_in_one_folder(tmp_path: Path) -> None:
    def begins(job_config: JobConfig) -> bool:
        with hold_checkpoints(job_config):
            return True

    with hold_checkpoints(saving_in(tmp_path)):
        with pytest.raises(ConfigError) as refused:
            begins(saving_in(tmp_path))
        assert f"job.dump_folder is '{tmp_path}', where another run is saving" in str(refused.value)
        assert "or name another folder" in str(refused.value)
        assert begins(saving_in(tmp_path, "other"))
        assert begins(saving_in(tmp_path, enable=False))
    assert begins(saving_in(tmp_path))


def test_where_files_cannot_be_locked_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(file: Path) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(launch_module, "FileLock", refuses)
    with hold_checkpoints(saving_in(tmp_path)):
        assert "cannot be locked (No locks available)" in caplog.text


ARGS = TransformerModelArgs(dim=16, n_layers=4, n_heads=2, vocab_size=2048)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments of a run of 4 steps, whose last checkpoint has the model alone."""
    monkeypatch.setitem(EXTRA_FLAVORS["llama3"], "tiny", ARGS)
    dcp.save(
        Transformer(ARGS).state_dict(), checkpoint_id=tmp_path / "checkpoint/step-4", no_dist=True
    )
    for name, folder in (("old", "checkpoint"), ("mine", "checkpoint"), ("other", "elsewhere")):
        config = make_job_config(checkpoint__enable=True, checkpoint__folder=folder)
        save_settings(tmp_path / "tb" / name, config.to_dict())
        write_whole(tmp_path / "tb" / name / "report.txt", f"Run report of {name}".encode())
    return [
        f"--job.dump_folder={tmp_path}", "--checkpoint.enable", "--model.flavor=tiny",
        "--training.dataset=alpaca", "--training.dataset_path=tests/assets/tiny_instruct",
    ]  # fmt: skip


@pytest.mark.parametrize("steps", [3, 4])
def test_its_report_is_told_again_once(
    run: list[str], steps: int, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [*run, f"--training.steps={steps}"]
    assert launch(arguments, local_rank=0) == 0
    said = capfd.readouterr().out
    assert said.startswith(f"This run is done at step 4 (training.steps is {steps}, ")
    # As is then refused.
    assert "step-4' holds the model alone (checkpoint.last_save_model_only), so a run can" in said
    assert "Run report of mine\n" in said
    assert launch(arguments, local_rank=1) == 0
    assert capfd.readouterr().out == ""
    assert not dist.is_initialized()


def test_a_run_that_was_killed_before_its_report_has_not_that_of_the_run_before(
    run: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tb/mine/report.txt").unlink()
    assert launch([*run, "--training.steps=4"], local_rank=0) == 0
    said = capfd.readouterr().out
    assert said.endswith("another checkpoint.folder; it ended before its report was written\n")


def test_from_where_it_goes_on_is_told(
    run: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = {**Transformer(ARGS).state_dict(), "train_state.step": torch.tensor(3)}
    dcp.save(whole, checkpoint_id=tmp_path / "checkpoint/step-3", no_dist=True)
    assert launch([*run, "--training.steps=4"], local_rank=0) == 0
    assert "; with more training.steps it goes on from step 3\n" in capfd.readouterr().out


def test_with_more_steps_it_is_not_done(run: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert launch([*run, "--training.steps=5"], local_rank=0) == 2
    assert "step-4' holds the model alone" in capfd.readouterr().out


def test_another_model_is_not_done(run: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert launch([*run, "--training.steps=4", "--model.flavor=8M"], local_rank=0) == 2
    assert "it has 4 layers, this model 10" in capfd.readouterr().out
