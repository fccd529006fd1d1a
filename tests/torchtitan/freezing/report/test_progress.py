import contextlib
import fcntl
import io
import logging
import os
import pty
import re
import struct
import sys
import termios
import time
from collections.abc import Iterator

import pytest

from tests.torchtitan.helpers.report_runs import end_step, run_in
from timelyfreeze.settings.phases import Phase
from torchtitan.freezing.report.progress import (
    Progress,
    Status,
    quiet_unless,
    status_text,
)


class Screen(io.StringIO):
    """Standard error, as a terminal or not."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def last_line(self) -> str:
        return [line for line in re.split(r"[\r\n]", self.getvalue()) if line.strip()][-1]


def put_up(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool = True) -> Screen:
    """Make standard error a screen. To be called in the test: pytest sets it again for each."""
    screen = Screen(is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def progress_of(n_steps: int, *, shown: bool) -> Progress:
    run = run_in(is_shown=shown)
    run.config.training.steps = n_steps
    return Progress(run)


@pytest.fixture(autouse=True)
def _root_level() -> Iterator[None]:
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.INFO)
    yield
    root.setLevel(level)


def run(progress: Progress) -> list[int]:
    """Three steps; returns the log level while upstream's line would be printed."""
    levels = []
    for step, phase in ((1, Phase.WARMUP), (2, Phase.UPPER_BOUND), (3, Phase.STABLE)):
        progress.show(step, Status(phase, loss=2.0 / step))
        with progress.instead_of_upstream():
            levels.append(logging.getLogger().level)
    return levels


def test_without_a_terminal_upstreams_plain_lines_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = put_up(monkeypatch, is_terminal=False)
    progress = progress_of(4, shown=True)
    assert run(progress) == [logging.INFO] * 3
    progress.close()
    assert pipe.getvalue() == ""


def test_without_a_terminal_the_log_gets_a_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put_up(monkeypatch, is_terminal=False)
    seconds = iter([0.0, 0.0, 58.0, 59.0, 60.0, 60.0, 121.0, 121.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    progress, hidden = progress_of(9, shown=True), progress_of(9, shown=False)
    with caplog.at_level(logging.INFO):
        for step in (1, 2, 3, 4):
            progress.show(step, Status(Phase.STABLE, loss=1.0, seconds_left=70.0))
            hidden.show(step, Status())
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"step {step}/9: freezing, loss 1.000, 01:10 left" for step in (3, 4)]


def test_a_rank_that_is_not_shown_draws_nothing_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = put_up(monkeypatch)
    progress = progress_of(4, shown=False)
    assert run(progress) == [logging.INFO] * 3
    progress.close()
    assert terminal.getvalue() == ""


def test_a_terminal_shows_the_status_instead_of_upstreams_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = put_up(monkeypatch)
    progress = progress_of(4, shown=True)
    assert run(progress) == [logging.WARNING] * 3
    assert logging.getLogger().level == logging.INFO
    progress.close()
    assert re.fullmatch(r"step 3/4 \|.{12}\| freezing, loss 0\.667", terminal.last_line().strip())


def read_to_end(terminal: int) -> bytes:
    """All that was written to a terminal, closed by now; one read may give a part of it."""
    parts = []
    with contextlib.suppress(OSError):  # nothing is left
        while part := os.read(terminal, 65536):
            parts.append(part)
    return b"".join(parts)


def test_a_narrow_terminal_cuts_the_line_and_never_wraps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a terminal of the kernel's, 40 columns wide."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        progress = progress_of(500, shown=True)
        for step in (1, 2):
            progress.show(step, Status(Phase.STABLE, None, 2.0, 1234.5, 0.5, 70.0))
        progress.close()
    seen = read_to_end(master).decode()
    os.close(master)
    lines = [line for line in re.split(r"[\r\n]+", seen) if line.strip()]
    assert all(len(line) <= 40 for line in lines), lines
    assert lines[-1].startswith("step 2/500 |")
    assert "freezing" in lines[-1]


def test_a_resumed_run_begins_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = put_up(monkeypatch)
    progress = progress_of(100, shown=True)
    progress.show(61, Status(Phase.UPPER_BOUND))
    progress.close()
    assert "step 60/100 " in terminal.getvalue()  # what earlier runs did is no progress of this one
    assert "step 61/100" in terminal.last_line()


def test_a_terminal_that_goes_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = put_up(monkeypatch)
    progress = progress_of(4, shown=True)
    progress.show(1, Status())

    def write(text: str) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(terminal, "write", write)
    monkeypatch.setattr(progress._bar, "mininterval", 0.0)
    progress.show(2, Status())
    assert progress._bar.n == 2
    progress.close()
    assert progress._bar is None


def test_without_freezing_the_line_has_no_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = put_up(monkeypatch)
    progress = progress_of(2, shown=True)
    progress.show(1, Status())
    progress.show(2, Status(loss=3.0))
    progress.close()
    assert terminal.last_line().strip().endswith("| loss 3.000")
    assert "freezing" not in terminal.getvalue()


def test_the_log_level_comes_back_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    put_up(monkeypatch)
    progress = progress_of(2, shown=True)
    progress.show(1, Status())
    with pytest.raises(RuntimeError, match="disk full"), progress.instead_of_upstream():
        raise RuntimeError("disk full")
    progress.close()
    assert logging.getLogger().level == logging.INFO


def test_closing_gives_the_log_its_stream_back_and_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = put_up(monkeypatch)
    root = logging.getLogger()
    before = list(root.handlers)
    progress = progress_of(2, shown=True)
    progress.show(1, Status())
    progress.close()
    progress.close()
    assert root.handlers == before
    assert "1/2" in terminal.last_line()


@pytest.mark.parametrize(
    ("shown", "rank", "log_rank", "level"),
    [
        (True, 3, None, logging.INFO),
        (False, 0, None, logging.WARNING),
        (False, 1, "0,1", logging.INFO),
        (False, 1, "0,11", logging.WARNING),
        (False, 1, "", logging.WARNING),
    ],
)
def test_only_the_shown_rank_and_those_named_talk(
    shown: bool, rank: int, log_rank: str | None, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOG_RANK", raising=False)
    if log_rank is not None:
        monkeypatch.setenv("LOG_RANK", log_rank)
    quiet_unless(shown, rank)
    assert logging.getLogger().level == level


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (Status(), ""),
        (Status(loss=2.5), "loss 2.500"),
        (Status(Phase.WARMUP, 9), "warming up (9 more steps)"),
        (Status(Phase.LOWER_BOUND, 1), "measuring, all frozen (1 more step)"),
        (Status(Phase.RAMP, 0), "freezing more and more (last step)"),
        (
            Status(Phase.STABLE, None, 2.0, 1234.5, 0.523, 70.0),
            "freezing, loss 2.000, 1,234 tokens/s, +52% throughput, 01:10 left",
        ),
        (Status(tokens_per_second=9.0, note=" without padding"), "9 tokens/s without padding"),
        (Status(Phase.OFF, gain=-0.014), "freezing is off, -1% throughput"),
    ],
)
def test_what_is_known_is_told_in_words(status: Status, text: str) -> None:
    assert status_text(status) == text


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_has_words(phase: Phase) -> None:
    assert status_text(Status(phase))


def test_the_time_left_follows_the_last_twenty_steps() -> None:
    progress, left = progress_of(100, shown=True), []
    progress.show = lambda step, status: left.append(status.seconds_left)  # type: ignore[method-assign]
    for step, seconds in enumerate([2.0, 4.0, *[1.0] * 20], 1):
        end_step(progress, step, None, seconds)
    assert left[:2] == [198.0, 3.0 * 98]
    assert left[-1] == 78.0
