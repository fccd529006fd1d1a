"""Display of a running training: a status line in a terminal, plain lines elsewhere."""

import logging
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from timelyfreeze.records.summary import RunSummary
from timelyfreeze.settings import Phase
from torchtitan.freezing.report.parts import EndedStep, Run, RunPart
from torchtitan.settings import model_family, padding_note

logger = logging.getLogger(__name__)

_WORDS = {
    Phase.ADAPTERS: "adapters learn",
    Phase.WARMUP: "warming up",
    Phase.UPPER_BOUND: "measuring, nothing frozen",
    Phase.LOWER_BOUND: "measuring, all frozen",
    Phase.MIXED: "measuring",
    Phase.RAMP: "freezing more and more",
    Phase.STABLE: "freezing",
    Phase.CONTROL: "freezing",
    Phase.OFF: "freezing is off",
}
# How often a log gets a line, in seconds.
_TELL_EVERY_S = 60.0
# Steps that the time left is reckoned from.
_WINDOW = 20


@dataclass(frozen=True)
class Status:
    """Position of a run; None for unknown values."""

    phase: Phase | None = None  # phase of the step; None without freezing
    steps_left_in_phase: int | None = None  # None where the phase lasts to the end
    loss: float | None = None  # logged last
    # per device, since the loss before; of what ``unit`` says
    tokens_per_second: float | None = None
    gain: float | None = None  # throughput over that without freezing, as a fraction
    seconds_left: float | None = None  # until the last step, at the pace of the last steps
    unit: str = "tokens"  # what throughput counts
    note: str = ""  # behind the throughput: what it leaves out


def status_text(status: Status) -> str:
    """Return the status in words, the most important first; unknown things are left out."""
    parts = []
    if status.phase is not None:
        left = status.steps_left_in_phase
        words = {None: "", 0: " (last step)", 1: " (1 more step)"}
        parts.append(_WORDS[status.phase] + words.get(left, f" ({left} more steps)"))
    left_s = status.seconds_left
    parts += [form.format(value) for form, value in (
        ("loss {:.3f}", status.loss),
        (f"{{:,.0f}} {status.unit}/s{status.note}", status.tokens_per_second),
        ("{:+.0%} throughput", status.gain),
        ("{} left", None if left_s is None else tqdm.format_interval(left_s)),
    ) if value is not None]  # fmt: skip
    return ", ".join(parts)


_FORMAT = "step {n_fmt}/{total_fmt} |{bar:12}| {desc}"


class Progress(RunPart):
    """A line in a terminal, on the shown rank; in a log a line per minute.

    Logs keep upstream's line per logged step, read by tools, and a line per phase.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._n_steps = run.config.training.steps
        self._status = Status(unit=model_family(run.config).unit, note=padding_note(run.config))
        self._seconds: deque[float] = deque(maxlen=_WINDOW)
        self._shown = run.is_shown and not run.config.report.quiet
        self._use_bar = self._shown and sys.stderr.isatty()
        self._told_at = time.monotonic()
        self._bar: tqdm[None] | None = None
        self._redirected = ExitStack()

    def note(self, loss: float, tokens_per_second: float | None) -> None:
        """Note values to show until the next logged step."""
        gain, speed = None, tokens_per_second
        if self.run.kappa and self.run.phase is not Phase.OFF:
            gain = 1 / self.run.kappa - 1
        self._status = replace(self._status, loss=loss, tokens_per_second=speed, gain=gain)

    def end_step(self, ended: EndedStep) -> None:
        controller, phase, left = self.run.controller, ended.phase, None
        ends = {} if controller is None else controller.phases.last_steps
        ends = {Phase.ADAPTERS: self.run.config.lora.until, **ends}
        if phase in ends:  # other phases last to the end
            left = ends[phase] - ended.step
        self._seconds.append(ended.seconds)
        left_s = statistics.fmean(self._seconds) * (self._n_steps - ended.step)
        self._status = replace(
            self._status, phase=phase, steps_left_in_phase=left, seconds_left=left_s
        )
        self.show(ended.step, self._status)

    def show(self, step: int, status: Status) -> None:
        """Show where the run is after ``step``."""
        if not self._use_bar:
            if self._shown and time.monotonic() >= self._told_at + _TELL_EVERY_S:
                self._told_at = time.monotonic()
                logger.info("step %d/%d: %s", step, self._n_steps, status_text(status))
            return
        if self._bar is None:
            self._bar = tqdm(
                total=self._n_steps, initial=step - 1, dynamic_ncols=True, bar_format=_FORMAT
            )
            self._redirected.enter_context(logging_redirect_tqdm())
        self._bar.set_description_str(status_text(status), refresh=False)
        with suppress(OSError):  # the terminal is gone: SIGHUP is on its way
            self._bar.update(step - self._bar.n)

    @contextmanager
    def instead_of_upstream(self) -> Iterator[None]:
        """Keep upstream's line back while a bar shows the same."""
        if self._bar is None:
            yield
            return
        root = logging.getLogger()
        level = root.level
        root.setLevel(logging.WARNING)
        try:
            yield
        finally:
            root.setLevel(level)

    def finish(self, summary: RunSummary) -> None:
        self.close()

    def close(self) -> None:
        """Take the line down, leaving its last state on the screen."""
        if self._bar is not None:
            with suppress(OSError):
                self._bar.refresh()
                self._bar.close()
            self._bar = None
        self._redirected.close()


def quiet_unless(shown: bool, rank: int) -> None:
    """Let only warnings through on hidden ranks, unless LOG_RANK names them."""
    talks = shown or str(rank) in os.environ.get("LOG_RANK", "").split(",")
    logging.getLogger().setLevel(logging.INFO if talks else logging.WARNING)
