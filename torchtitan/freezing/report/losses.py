"""The loss of a run: its file, a warning when it is no number, and the run it is compared with.

``losses.csv`` is written while the run goes on. Its columns::

    step,seconds,train_loss,validation_loss

``seconds`` is the sum of the step times up to and including ``step``; validation and checkpoints
are not in it, nor what a run did before it was resumed. A row holds one loss, the other column is
empty: a step that was logged has a row with its training loss, a validation one of its own behind
that, with the same step and seconds. Rows are in the order in which they were written, each on disk
before the run goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timelyfreeze.files import parse_json
from timelyfreeze.records import (
    ACCURACIES,
    LOSSES,
    WINDOW,
    AccuracyRow,
    last_running_mean,
    seconds_to_reach,
)
from timelyfreeze.settings import Phase
from torchtitan.freezing.config import JobConfig


class LossCurve:
    """Appends rows to a CSV file.

    Args:
        path: A file that does not exist yet, in a folder that does.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._append("step,seconds,train_loss,validation_loss")

    def add_train(self, step: int, seconds: float, loss: float) -> None:
        """Append a logged training loss."""
        self._append(f"{step},{seconds:.3f},{loss!r},")

    def add_validation(self, step: int, seconds: float, loss: float) -> None:
        """Append the loss of a validation."""
        self._append(f"{step},{seconds:.3f},,{loss!r}")

    def _append(self, row: str) -> None:
        # Opened for each row: what is closed is not lost in a crash.
        with self._path.open("a") as file:
            file.write(row + "\n")


def add_accuracies(folder: Path, row: AccuracyRow) -> None:
    """Append what a validation counted to ``accuracies.csv``, which a run on text never has."""
    if not (folder / ACCURACIES.name).exists():
        ACCURACIES.write(folder)
    ACCURACIES.append(folder, [row])


class FiniteWatch:
    """Looks at each logged step; upstream logs what is not finite and trains on."""

    def __init__(self) -> None:
        self._was_finite = True

    def note(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        phase: Phase | None = None,
        stage_ratios: Mapping[int, float] | None = None,
    ) -> str | None:
        """Return a warning at the first step of each spell that is not finite.

        Args:
            step: The logged step.
            loss: Its training loss.
            grad_norm: Its gradient norm.
            phase: What the step was for; None where nothing is frozen by design.
            stage_ratios: What was frozen of each stage in it.
        """
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        was_finite, self._was_finite = self._was_finite, is_finite
        if is_finite or not was_finite:
            return None
        text = f"Step {step} has loss {loss:g} and gradient norm {grad_norm:g}"
        mend = "resume from a checkpoint before it, with a lower optimizer.lr or another debug.seed"
        if phase is not None:
            ratios = " ".join(f"{s}:{r:.2f}" for s, r in (stage_ratios or {}).items()) or "unknown"
            text += f", in freezing phase {phase.value}, frozen of each stage: {ratios}"
            mend += ", or a lower freezing.max_freeze_ratio"
        return f"{text}; weights that are not finite stay so: {mend}"


_KEY = "report.reference_run"


@dataclass(frozen=True)
class Reference:
    """What a run has to reach.

    Attributes:
        folder: Of the reference run.
        loss: Its last training loss, mean of ``WINDOW`` logged ones.
        seconds: When its own mean first came down to that.
        device: What it ran on; None if it does not say.
    """

    folder: Path
    loss: float
    seconds: float
    device: str | None

    def compared(self, folder: Path) -> dict[str, Any]:
        """Return the fields of a summary that hold the run in ``folder`` against this one."""
        return {
            "reference_run": str(self.folder),
            "reference_device": self.device,
            "reference_loss": self.loss,
            "reference_seconds": self.seconds,
            "seconds_to_reference_loss": seconds_to_loss_of(self, folder),
        }


def read_reference(folder: Path) -> Reference:
    """Read what a run ended with.

    Raises:
        ValueError: If there is no such run, or it has not logged losses enough.
    """
    key = f"{_KEY} is {str(folder)!r}, which"
    if not folder.is_dir():
        raise ValueError(f"{key} is no folder; name that of a run")
    if not (folder / LOSSES.name).is_file():
        raise ValueError(f"{key} has no {LOSSES.name}; name that of a run")
    try:
        curve = training_curve(folder)
    except (ValueError, OSError) as error:
        raise ValueError(f"{key} cannot be read: {error}") from error
    loss = last_running_mean(curve, WINDOW)
    seconds = None if loss is None else seconds_to_reach(curve, loss, WINDOW)
    if loss is None or seconds is None:
        raise ValueError(
            f"{key} has {len(curve)} logged training losses; its last {WINDOW} must be there and "
            "be numbers"
        )
    return Reference(folder, loss, seconds, _device(folder))


def reference_errors(config: JobConfig) -> Iterator[str]:
    """Say what is wrong with the reference run, if one is named."""
    if config.report.reference_run is not None:
        try:
            read_reference(Path(config.report.reference_run))
        except ValueError as error:
            yield str(error)


def training_curve(folder: Path) -> list[tuple[float, float]]:
    """Return seconds and loss of each step whose training loss was logged.

    Raises:
        OSError: If there are no losses.
        ValueError: If they cannot be read.
    """
    rows = LOSSES.read(folder)
    return [(row.seconds, row.train_loss) for row in rows if row.train_loss is not None]


def seconds_to_loss_of(reference: Reference, folder: Path) -> float | None:
    """Return when the run in ``folder`` got to the loss of ``reference``; None if it never did."""
    return seconds_to_reach(training_curve(folder), reference.loss, WINDOW)


def _device(folder: Path) -> str | None:
    try:
        device = parse_json((folder / "summary.json").read_bytes()).get("device")
    except (OSError, ValueError, AttributeError):
        return None
    return device if isinstance(device, str) else None
