"""The run that another one is held against: when its loss was reached."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from timelyfreeze.files import parse_json
from timelyfreeze.records import (
    LOSSES_FILE,
    WINDOW,
    last_running_mean,
    read_losses,
    seconds_to_reach,
)
from torchtitan.freezing.config import JobConfig

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


def read_reference(folder: Path) -> Reference:
    """Read what a run ended with.

    Raises:
        ValueError: If there is no such run, or it has not logged losses enough.
    """
    if not folder.is_dir():
        raise ValueError(f"{_KEY} is {str(folder)!r}, which is no folder; name that of a run")
    if not (folder / LOSSES_FILE).is_file():
        raise ValueError(
            f"{_KEY} is {str(folder)!r}, which has no {LOSSES_FILE}; name that of a run"
        )
    try:
        curve = training_curve(folder)
    except (ValueError, OSError) as error:
        raise ValueError(f"{_KEY} is {str(folder)!r}, which cannot be read: {error}") from error
    loss = last_running_mean(curve, WINDOW)
    seconds = None if loss is None else seconds_to_reach(curve, loss, WINDOW)
    if loss is None or seconds is None:
        raise ValueError(
            f"{_KEY} is {str(folder)!r}, which has {len(curve)} logged training losses; its last "
            f"{WINDOW} must be there and be numbers"
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
    rows = read_losses(folder)
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
