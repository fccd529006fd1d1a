"""The loss over steps and time as ``losses.csv``, written while the run goes on.

Columns::

    step,seconds,train_loss,validation_loss

``seconds`` is the sum of the step times up to and including ``step``; validation and checkpoints
are not in it, nor what a run did before it was resumed. A row holds one loss, the other column is
empty: a step that was logged has a row with its training loss, a validation one of its own behind
that, with the same step and seconds. Rows are in the order in which they were written, each on disk
before the run goes on.
"""

from __future__ import annotations

from pathlib import Path

COLUMNS = ("step", "seconds", "train_loss", "validation_loss")


class LossCurve:
    """Appends rows to a CSV file.

    Args:
        path: A file that does not exist yet, in a folder that does.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._append(",".join(COLUMNS))

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
