"""When the steps of a run ended, in seconds of training."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from timelyfreeze.records import LossRow, Move, RunSummary, StepRow


def virtual_ends(
    summary: RunSummary, steps: Sequence[StepRow], losses: Sequence[LossRow]
) -> dict[int, float]:
    """Return seconds at the end of each step of an emulated pipeline, by its virtual clock.

    Empty for any other run, and where the clock has not told of all steps.
    """
    known = [
        (row.step, row.virtual_step_ms)
        for row in steps
        if row.virtual_step_ms is not None and 0.0 < row.virtual_step_ms < math.inf
    ]
    if summary.emulated_ranks is None or len(known) < len(steps):
        return {}
    ends = itertools.accumulate(ms / 1e3 for _, ms in known)
    found = dict(zip((step for step, _ in known), ends, strict=True))
    return found if all(row.step in found for row in losses) else {}


def moved_seconds(moves: Sequence[Move], step: int) -> float:
    """Return what the moves of an elastic run up to a step took, of which no step's time has any.

    In an emulation they took one process so long.
    """
    return sum(move.seconds for move in moves if move.step <= step)
