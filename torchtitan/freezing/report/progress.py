"""What a person sees while training runs: a status line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from torchtitan.freezing.report.status import Status, status_text

_FORMAT = "step {n_fmt}/{total_fmt} |{bar:12}| {desc}"


class Progress:
    """One line on the rank that is shown, if its output is a terminal.

    Otherwise upstream's line per logged step stays, which tools read, and the line that the
    controller writes when a phase begins.

    Args:
        n_steps: Steps of the whole run.
        shown: Whether this rank shows anything.
    """

    def __init__(self, n_steps: int, *, shown: bool) -> None:
        self._n_steps = n_steps
        self._use_bar = shown and sys.stderr.isatty()
        self._bar: tqdm[None] | None = None
        self._redirect = None

    def show(self, step: int, status: Status) -> None:
        """Show where the run is after ``step``."""
        if not self._use_bar:
            return
        if self._bar is None:
            self._bar = tqdm(
                total=self._n_steps, initial=step - 1, dynamic_ncols=True, bar_format=_FORMAT
            )
            self._redirect = logging_redirect_tqdm()
            self._redirect.__enter__()
        self._bar.set_description_str(status_text(status), refresh=False)
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

    def close(self) -> None:
        """Take the line down, leaving its last state on the screen."""
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
            self._bar = None
        if self._redirect is not None:
            self._redirect.__exit__(None, None, None)
            self._redirect = None


def quiet_unless(shown: bool, rank: int) -> None:
    """Let only warnings through on a rank that is not shown, unless LOG_RANK names it."""
    if not shown and str(rank) not in os.environ.get("LOG_RANK", "").split(","):
        logging.getLogger().setLevel(logging.WARNING)
