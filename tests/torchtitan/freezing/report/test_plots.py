"""Plots drawn by a process of their own, and what becomes of it when that fails."""

import struct
import zlib
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from tests.timelyfreeze.plots.folders import write_plan
from tests.torchtitan.helpers.report_runs import run_in
from tests.torchtitan.helpers.summaries import make_summary
from timelyfreeze.plots.drawing import Drawn
from torchtitan.freezing.report import plots
from torchtitan.freezing.report.plots import RunPlots, image_summary, tag_of


def tiny_png(width: int, height: int) -> bytes:
    """A black plot, made by the format's own rules."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(b"".join(b"\x00" + bytes(width) for _ in range(height)))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


class StubCall:
    """Stands in for a process that draws: ends when it is told to."""

    made: ClassVar[list["StubCall"]] = []

    def __init__(self, function: Any, run_folder: Path) -> None:
        self.folder = run_folder
        self.done = False
        self.answer: Drawn | Exception = Drawn((), {}, {})
        self.is_cancelled = False
        StubCall.made.append(self)

    def result(self) -> Drawn:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def cancel(self) -> None:
        self.is_cancelled = True

    def end(self, answer: Drawn | Exception) -> None:
        self.answer, self.done = answer, True


class AwaitedStub(StubCall):
    """One that somebody waits for."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[StubCall]:
    monkeypatch.setattr(StubCall, "made", [])
    monkeypatch.setattr(plots, "BackgroundCall", StubCall)
    monkeypatch.setattr(plots, "AwaitedCall", AwaitedStub)
    return StubCall.made


def images(folder: Path) -> dict[str, list[tuple[int, int, int, bytes]]]:
    events = EventAccumulator(str(folder), size_guidance={"images": 0})
    events.Reload()
    return {
        tag: [(e.step, e.width, e.height, e.encoded_image_string) for e in events.Images(tag)]
        for tag in events.Tags()["images"]
    }


def test_finished_plots_are_shown_as_they_are(tmp_path: Path, calls: list[StubCall]) -> None:
    writer = SummaryWriter(str(tmp_path))
    run = RunPlots(run_in(tmp_path), writer)
    file, svg = tmp_path / "timeline_measured.png", tmp_path / "timeline_measured.svg"
    file.write_bytes(tiny_png(7, 3))
    run.draw()
    run.show(10)
    calls[0].end(Drawn((file, svg), {"curves": "no steps.csv"}, {}))
    run.show(20)
    run.show(30)
    writer.close()
    assert images(tmp_path) == {"freezing/timeline/measured": [(20, 7, 3, tiny_png(7, 3))]}


def test_a_plot_that_has_not_changed_is_shown_once(tmp_path: Path, calls: list[StubCall]) -> None:
    writer = SummaryWriter(str(tmp_path))
    run = RunPlots(run_in(tmp_path), writer)
    file = tmp_path / "curves.png"
    for step, width in enumerate([5, 5, 6]):
        file.write_bytes(tiny_png(width, 1))
        run.draw()
        calls[-1].end(Drawn((file,), {}, {}))
        run.show(step)
    writer.close()
    curves = images(tmp_path)["freezing/curves"]
    assert [(step, width) for step, width, _, _ in curves] == [(0, 5), (2, 6)]


def test_one_process_draws_at_a_time_and_what_is_new_is_not_forgotten(
    tmp_path: Path, calls: list[StubCall]
) -> None:
    run = RunPlots(run_in(tmp_path), None)
    for _ in range(3):
        run.draw()
    assert len(calls) == 1
    calls[0].end(Drawn((), {}, {}))
    run.show(1)
    assert len(calls) == 2
    calls[1].end(Drawn((), {}, {}))
    run.show(2)
    assert len(calls) == 2


def test_a_process_that_fails_is_one_warning_and_nothing_more_is_drawn(
    tmp_path: Path, calls: list[StubCall], caplog: pytest.LogCaptureFixture
) -> None:
    run = RunPlots(run_in(tmp_path), None)
    run.draw()
    calls[0].end(RuntimeError("out of paint"))
    run.show(1)
    run.draw()
    run.finish(make_summary(steps_done=2))
    assert len(calls) == 1
    (record,) = caplog.records
    assert "out of paint" in record.message
    assert f"timelyfreeze draw {tmp_path}" in record.message


def test_a_broken_file_is_told_and_the_rest_is_shown(
    tmp_path: Path, calls: list[StubCall], caplog: pytest.LogCaptureFixture
) -> None:
    writer = SummaryWriter(str(tmp_path))
    run = RunPlots(run_in(tmp_path), writer)
    file = tmp_path / "timeline_predicted.png"
    file.write_bytes(tiny_png(1, 1))
    run.draw()
    calls[0].end(Drawn((file,), {}, {"timeline_measured": "not the text of a timeline"}))
    run.show(1)
    writer.close()
    assert "timeline_measured: not the text of a timeline" in caplog.text
    assert list(images(tmp_path)) == ["freezing/timeline/predicted"]


@pytest.mark.slow
def test_the_end_waits_for_a_last_drawing(tmp_path: Path) -> None:
    """With a real process, of a run that has nothing but its plan."""
    write_plan(tmp_path)
    RunPlots(run_in(tmp_path), None).finish(make_summary(steps_done=1))
    assert (tmp_path / "plots" / "timeline_predicted.png").stat().st_size > 0


def test_the_last_drawing_does_not_wait_for_one_at_the_lowest_priority(
    tmp_path: Path, calls: list[StubCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots.time, "sleep", lambda seconds: calls[-1].end(Drawn((), {}, {})))
    run = RunPlots(run_in(tmp_path), None)
    run.draw()
    run.finish(make_summary(steps_done=1))
    assert [type(call) for call in calls] == [StubCall, AwaitedStub]
    assert calls[0].is_cancelled


def test_a_drawing_that_takes_for_ever_is_given_up(
    tmp_path: Path,
    calls: list[StubCall],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(plots, "LONGEST_WAIT_S", 0.1)
    RunPlots(run_in(tmp_path), None).finish(make_summary(steps_done=1))
    assert calls[0].is_cancelled
    assert "could not be drawn" in caplog.text


def test_closing_ends_the_process(tmp_path: Path, calls: list[StubCall]) -> None:
    run = RunPlots(run_in(tmp_path), None)
    run.draw()
    run.close()
    assert calls[0].is_cancelled


def test_tags_put_plots_of_a_kind_together() -> None:
    assert tag_of(Path("timeline_measured.png")) == "freezing/timeline/measured"
    assert tag_of(Path("curves.png")) == "freezing/curves"
    assert image_summary("a/b", tiny_png(300, 200)).value[0].image.width == 300
