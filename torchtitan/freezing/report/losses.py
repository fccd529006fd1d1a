"""A run's losses: watched, reported, and compared with those of another run."""

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchtitan.tools.logging import logger

from timelyfreeze.files import read_object
from timelyfreeze.records import tables
from timelyfreeze.records.held_out import HELD_OUT, HeldOutRow, standard_error
from timelyfreeze.records.summary import SUMMARY_FILE, RunSummary
from torchtitan.freezing.report.parts import EndedStep, LoggedStep, Run, RunPart
from torchtitan.settings import JobConfig

# What a validation of pictures counts besides its loss.
_SCORES = {f"validation_{name}": f"validation_metrics/{name}" for name in ("top1", "top5")}


class Losses(RunPart):
    """Writes logged losses, validation losses, ``losses.csv``, and accuracies of pictures."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._logged: list[tuple[int, float]] = []
        self._last_step = 0
        self._validation: dict[str, float | None] = {}
        self._validation_error: float | None = None  # of the latest parts, which come first
        run.append(tables.LOSSES, [])

    def log_step(self, logged: LoggedStep) -> None:
        self._logged.append((logged.step, logged.loss))

    def end_step(self, ended: EndedStep) -> None:
        self._last_step = ended.step
        if self._logged and self._logged[-1][0] == ended.step:
            self._append(ended.step, repr(self._logged[-1][1]), "")

    def log_validation(self, step: int, loss: float, scores: dict[str, Any]) -> None:
        """Write a validation; the last one counts."""
        counted = {f: scores[metric] for f, metric in _SCORES.items() if metric in scores}
        error = {"validation_error": self._validation_error}
        self._validation = {"validation_loss": loss} | error | counted
        self._append(step, "", repr(loss))
        if len(counted) == len(_SCORES):
            self.run.append(
                tables.ACCURACIES, [tables.AccuracyRow(step, self.run.seconds, *counted.values())]
            )

    def log_held_out(self, step: int, parts: Sequence[tuple[int, float]]) -> None:
        """Write the parts of a validation; the last one counts."""
        rows = [HeldOutRow(step, i, *part) for i, part in enumerate(parts)]
        self.run.append(HELD_OUT, rows)
        self._validation_error = standard_error(rows)

    def fields(self, summary: RunSummary) -> dict[str, Any]:
        """Return the last losses; the training loss is the mean of the last tenth of steps."""
        if not self._logged:
            return dict(self._validation)
        n_last = max(1, self._last_step // 10)
        recent = [loss for step, loss in self._logged if step > self._last_step - n_last]
        last = self._logged[-1][1]
        mean = statistics.fmean(recent or [last])
        return {"train_loss": mean, "last_loss": last, **self._validation}

    def _append(self, step: int, *losses: str) -> None:
        """Write a line, losses to their last digit."""
        if self.run.is_shown:
            with self.run.writing():
                line = [str(step), f"{self.run.seconds:.3f}", *losses]
                tables.LOSSES.append_cells(self.run.folder, [line])


class FiniteWatch(RunPart):
    """Warns at the first step of any spell without finite losses; upstream trains on."""

    _was_finite = True

    def log_step(self, logged: LoggedStep) -> None:
        is_finite = math.isfinite(logged.loss) and math.isfinite(logged.grad_norm)
        was_finite, self._was_finite = self._was_finite, is_finite
        if is_finite or not was_finite or not self.run.is_shown:
            return
        text = f"Step {logged.step} has loss {logged.loss:g} and gradient norm {logged.grad_norm:g}"
        mend = "resume from a checkpoint before it, with a lower optimizer.lr or another debug.seed"
        if logged.phase is not None:
            applied = {} if logged.metrics is None else logged.metrics.applied_stage_ratios
            ratios = " ".join(f"{s}:{r:.2f}" for s, r in applied.items()) or "unknown"
            text += f", in freezing phase {logged.phase.value}, frozen of each stage: {ratios}"
            mend += ", or a lower freezing.max_freeze_ratio"
        logger.warning(f"{text}; weights that are not finite stay so: {mend}")


class Reference(RunPart):
    """Compares the run with another, read early so that later changes do no harm."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        name = run.config.report.reference_run
        self._target = read_reference(Path(name)) if name is not None and run.is_shown else None

    def fields(self, summary: RunSummary) -> dict[str, Any]:
        if (found := self._target) is None:
            return {}
        try:
            curve = training_curve(self.run.folder)
        except (OSError, ValueError) as error:  # a folder that was deleted, a full disk
            logger.warning("report.reference_run is not compared with: %s", error)
            return found
        seconds = tables.seconds_to_reach(curve, found["reference_loss"], tables.WINDOW)
        return found | {"seconds_to_reference_loss": seconds}


def read_reference(folder: Path) -> dict[str, Any]:
    """Return the reference's fields for a summary; a ValueError if unusable."""
    key = f"report.reference_run is {str(folder)!r}, which"
    if not folder.is_dir():
        raise ValueError(f"{key} is no folder; name that of a run")
    if not (folder / tables.LOSSES.name).is_file():
        raise ValueError(f"{key} has no {tables.LOSSES.name}; name that of a run")
    try:
        curve = training_curve(folder)
    except (ValueError, OSError) as error:
        raise ValueError(f"{key} cannot be read: {error}") from error
    loss = tables.last_running_mean(curve, tables.WINDOW)
    seconds = None if loss is None else tables.seconds_to_reach(curve, loss, tables.WINDOW)
    if loss is None or seconds is None:
        raise ValueError(
            f"{key} has {len(curve)} logged training losses; its last {tables.WINDOW} must be "
            "there and be numbers"
        )
    device = None
    with suppress(OSError, ValueError):  # of a run that has not ended there is none
        device = read_object(folder / SUMMARY_FILE).get("device")
    return {
        "reference_run": str(folder),
        "reference_device": device if isinstance(device, str) else None,
        "reference_loss": loss,
        "reference_seconds": seconds,
    }


def reference_errors(config: JobConfig) -> Iterator[str]:
    """Yield errors of the reference run, if named."""
    if config.report.reference_run is not None:
        try:
            read_reference(Path(config.report.reference_run))
        except ValueError as error:
            yield str(error)


def training_curve(folder: Path) -> list[tuple[float, float]]:
    """Return seconds and loss of all steps with a logged training loss."""
    rows = tables.LOSSES.read(folder)
    return [(row.seconds, row.train_loss) for row in rows if row.train_loss is not None]
