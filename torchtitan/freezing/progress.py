"""What a person sees while training runs: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from timelyfreeze.phases import Phase


class Progress:
    """One bar on the rank that is shown, if its output is a terminal.

    Otherwise upstream's line per logged step stays.

    Args:
        n_steps: Steps of the whole run.
        shown: Whether this rank shows anything.
    """

    def __init__(self, n_steps: int, *, shown: bool) -> None:
        self._n_steps = n_steps
        self._use_bar = shown and sys.stderr.isatty()
        self._bar: tqdm[None] | None = None
        self._redirect = None

    def step(self, step: int, phase: Phase | None) -> None:
        """Move the bar to ``step``."""
        if not self._use_bar:
            return
        if self._bar is None:
            self._bar = tqdm(total=self._n_steps, initial=step - 1, unit="step", dynamic_ncols=True)
            self._redirect = logging_redirect_tqdm()
            self._redirect.__enter__()
        if phase is not None:
            self._bar.set_description(phase.value.replace("_", " "))
        self._bar.update(step - self._bar.n)

    def log(self, step: int, loss: float, grad_norm: float) -> None:
        """Show the newest figures beside the bar."""
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{loss:.4f}", grad_norm=f"{grad_norm:.3f}")

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
        """Take the bar down, leaving its last state on the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._redirect is not None:
            self._redirect.__exit__(None, None, None)
            self._redirect = None


def quiet_unless(shown: bool, rank: int) -> None:
    """Let only warnings through on a rank that is not shown, unless LOG_RANK names it."""
    if not shown and str(rank) not in os.environ.get("LOG_RANK", "").split(","):
        logging.getLogger().setLevel(logging.WARNING)
