"""What each process says of a command line that cannot be used; nothing starts here."""

import logging

import pytest

from tests.torchtitan.helpers.job_configs import make_job_config
from torchtitan.freezing import launch as launch_module
from torchtitan.freezing.launch import launch
from torchtitan.images.examples import ImageError

# Wrong for the parser, which prints by itself; wrong for our checks, which raise.
MISTAKES = ["--unknown.key=1", "--training.steps=x", "--model.vocab_size=0"]


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
