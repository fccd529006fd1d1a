"""Lets training go on where its own records cannot be written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan.tools.logging import logger


class OutputGuard:
    """Turns a full disk into one warning: a curve that has a gap is no reason to lose a night.

    Checkpoints do not come through here; without them a run has nothing to show.

    Args:
        folder: The run's own folder, for the warning.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._has_warned = False

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write inside; what fails for the file system's reasons is told once."""
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "The run's files in %s cannot be written (%s); training goes on, and metrics "
                    "are missing there from now on",
                    self._folder,
                    error.strerror or error,
                )
