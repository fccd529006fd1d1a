"""Plots of a run, drawn by a process of their own and shown in TensorBoard."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torchtitan.tools.logging import logger

from timelyfreeze.planning import AwaitedCall, BackgroundCall, FreezePlan
from timelyfreeze.records.summary import RunSummary
from timelyfreeze.timing import DurationBounds
from torchtitan.freezing.report.parts import LoggedStep, Run, RunPart

if TYPE_CHECKING:
    from timelyfreeze.plots.drawing import Drawn

# Drawing takes seconds; a run that has ended waits for it no longer than this.
LONGEST_WAIT_S = 300.0


class RunPlots(RunPart):
    """Has plots drawn from a run's files whenever there is something new in them.

    Plots are not worth a run: whatever goes wrong is told once, and no more is drawn.
    """

    def __init__(self, run: Run, writer: Any | None) -> None:
        # Imported here: of what imports this module only a run that draws needs matplotlib.
        from timelyfreeze.plots.drawing import draw_run

        super().__init__(run)
        self._draw_run = draw_run
        self._writer = writer
        self._call: BackgroundCall[Drawn] | None = None
        self._is_due = False
        self._has_failed = False
        self._shown: dict[str, bytes] = {}

    def begin_plan(self, plan: FreezePlan, bounds: DurationBounds, **about: Any) -> None:
        self.run.has_news = True

    def log_step(self, logged: LoggedStep) -> None:
        self.show(logged.step)
        # Drawing could hold up the actions that are timed on a CPU meanwhile.
        is_timed = logged.phase is not None and logged.phase.monitors
        if self.run.has_news and not is_timed:
            self.run.has_news = False
            self.draw()

    def leave(self) -> None:
        """Draw no more of a pipeline: its files are about to be renamed."""
        self.close()
        self.run.has_news = True

    def draw(self) -> None:
        """Have everything drawn: at once, or after the present drawing process."""
        self._is_due = True
        self._begin(BackgroundCall)

    def show(self, step: int) -> None:
        """Show the finished plots as of ``step``, without waiting."""
        if self._call is not None and self._call.done:
            self._take(self._call, step)
            self._begin(BackgroundCall)

    def finish(self, summary: RunSummary) -> None:
        """Draw everything at the end of the run, wait, and show."""
        self.close()
        self._is_due = True
        self._begin(AwaitedCall)
        deadline = time.monotonic() + LONGEST_WAIT_S
        while self._call is not None:
            if self._call.done:
                self._take(self._call, summary.steps_done)
            elif time.monotonic() > deadline:
                self._warn(f"the process that draws has taken more than {LONGEST_WAIT_S:.0f} s")
                self.close()
            else:
                time.sleep(0.05)

    def close(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def _begin(self, kind: Callable[..., BackgroundCall[Drawn]]) -> None:
        if self._is_due and self._call is None and not self._has_failed:
            self._is_due = False
            self._call = kind(self._draw_run, self.run.folder)

    def _take(self, call: BackgroundCall[Drawn], step: int) -> None:
        try:
            drawn = call.result()
        except Exception as error:  # whatever it is, the run goes on
            self._warn(str(error) or repr(error))
        else:
            for name, reason in drawn.broken.items():
                self._warn(f"{name}: {reason}")
            for file in drawn.files:
                if self._writer is None or file.suffix != ".png":
                    continue
                if self._shown.get(file.stem) != (png := file.read_bytes()):
                    self._shown[file.stem] = png
                    self._writer.file_writer.add_summary(image_summary(tag_of(file), png), step)
        self.close()

    def _warn(self, reason: str) -> None:
        if not self._has_failed:
            logger.warning(
                "Plots of this run could not be drawn (%s); draw them later: timelyfreeze draw %s",
                reason,
                self.run.folder,
            )
        self._has_failed = True


def tag_of(file: Path) -> str:
    """Return the tag of a plot: "freezing/timeline/measured" for timeline_measured.png."""
    return "freezing/" + file.stem.replace("_", "/", 1)


def image_summary(tag: str, png: bytes) -> Summary:
    """Return a PNG file for TensorBoard, unchanged."""
    width, height = struct.unpack(">II", png[16:24])  # of the header chunk, always the first
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
    return Summary(value=[Summary.Value(tag=tag, image=image)])
