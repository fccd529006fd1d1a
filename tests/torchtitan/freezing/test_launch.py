"""What each process says of a command line that cannot be used; nothing starts here."""

import pytest

from torchtitan.freezing import launch as launch_module
from torchtitan.freezing.launch import launch

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
