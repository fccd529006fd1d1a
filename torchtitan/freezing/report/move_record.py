"""Moves of an elastic run as they happen, and how long steps took before and after each."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from timelyfreeze.records import MOVES, SKIPPED_STEPS, Move


@dataclass(frozen=True)
class TimedMove:
    """A move and what it brought.

    Attributes:
        move: To which pipeline, and when.
        before_ms: Median step of the pipeline that was left, without its first ones, which run
            cold; None if it had no other.
        after_ms: Likewise of the pipeline that came.
    """

    move: Move
    before_ms: float | None
    after_ms: float | None


class MoveRecord:
    """Collects moves and writes each down at once.

    Args:
        folder: Of the run; None on ranks that write nothing.
        writing: What rows are written in.
    """

    def __init__(
        self,
        folder: Path | None,
        writing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._folder = folder
        self._writing = writing
        self._moves: list[Move] = []
        self._seconds: list[list[float]] = [[]]  # of the steps in each pipeline

    def add_step(self, seconds: float) -> None:
        """Take note of a finished step in the present pipeline."""
        self._seconds[-1].append(seconds)

    def add(self, move: Move) -> None:
        """Take note of a move; steps to come are those of the new pipeline."""
        self._moves.append(move)
        self._seconds.append([])
        if self._folder is not None:
            with self._writing():
                if len(self._moves) == 1:
                    MOVES.write(self._folder)
                MOVES.append(self._folder, [move])

    @property
    def seconds(self) -> float:
        """What all moves took together."""
        return sum(move.seconds for move in self._moves)

    def timed(self) -> list[TimedMove]:
        """Return the moves so far, the oldest first."""
        medians = [_median_ms(seconds) for seconds in self._seconds]
        triples = zip(self._moves, medians[:-1], medians[1:], strict=True)
        return [TimedMove(move, before, after) for move, before, after in triples]


def _median_ms(seconds: list[float]) -> float | None:
    warm = seconds[SKIPPED_STEPS:]
    return 1e3 * statistics.median(warm) if warm else None
