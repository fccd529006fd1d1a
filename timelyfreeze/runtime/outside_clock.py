"""Times what an optimizer step does besides its batches: optimizer, clipping, data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from timelyfreeze.runtime.recorder import Clock


class OutsideClock:
    """Adds up the time between the batches of a step, before the first and after the last.

    Steps that nobody begins leave no marks.

    Args:
        clock: Takes the marks.
        waited_ms: Returns how much of the time of the step so far a rank of its own would not
            take, such as other ranks' optimizers where one process emulates all.
    """

    def __init__(self, clock: Clock, waited_ms: Callable[[], float] = lambda: 0.0) -> None:
        self._clock = clock
        self._waited_ms = waited_ms
        self._marks: list[Any] = []

    def begin_step(self) -> None:
        """Enter a step that is to be timed."""
        self._marks = [self._clock.mark()]

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Leave out the block, which runs a batch."""
        if not self._marks:
            yield
            return
        self._marks.append(self._clock.mark())
        try:
            yield
        finally:
            self._marks.append(self._clock.mark())

    def end_step(self) -> float | None:
        """Return the time, milliseconds; None if the step was not begun. Waits for the device."""
        if not self._marks:
            return None
        marks, self._marks = [*self._marks, self._clock.mark()], []
        self._clock.wait(marks[-1])
        gaps = zip(marks[::2], marks[1::2], strict=True)
        spent_ms = sum(self._clock.elapsed_ms(start, end) for start, end in gaps)
        return max(0.0, spent_ms - self._waited_ms())
