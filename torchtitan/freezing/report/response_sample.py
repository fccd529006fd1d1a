"""Keeps some of the backwards of a run: how long each took, and how much of it was frozen."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from timelyfreeze.control import ObservedBatch
from timelyfreeze.records import ResponseRow

# Kept of each stage, kind and phase.
N_KEPT = 120


class ResponseSample:
    """A fair sample of each stage's backwards in each phase, by Vitter's algorithm R.

    What is kept depends on the order of batches alone, so a repeated run keeps the same ones. Batches
    that run cold are left out.

    Args:
        n_kept: Number to keep of each stage, kind and phase.
    """

    def __init__(self, n_kept: int = N_KEPT) -> None:
        self._n_kept = n_kept
        self._kept: dict[tuple[int, str, str], list[ResponseRow]] = {}
        self._n_seen: dict[tuple[int, str, str], int] = {}
        self._rng = np.random.default_rng(0)

    def add(self, observed: ObservedBatch) -> None:
        """Take note of a pass."""
        if observed.is_cold:
            return
        for action, fraction in observed.fractions.items():
            row = ResponseRow(
                stage=action.stage,
                kind=action.kind.value,
                phase=observed.phase.value,
                microbatch=action.microbatch,
                fraction=fraction,
                duration_ms=observed.record.durations_ms[action],
                cut=int(action in observed.cut),
            )
            self._offer(row)

    def _offer(self, row: ResponseRow) -> None:
        key = (row.stage, row.kind, row.phase)
        kept = self._kept.setdefault(key, [])
        n_seen = self._n_seen[key] = self._n_seen.get(key, 0) + 1
        if n_seen <= self._n_kept:
            kept.append(row)
            return
        place = int(self._rng.integers(n_seen))
        if place < self._n_kept:
            kept[place] = row

    def by_stage(self) -> dict[int, list[ResponseRow]]:
        """Return what is kept, by stage."""
        stages: dict[int, list[ResponseRow]] = {}
        for row in self._rows():
            stages.setdefault(row.stage, []).append(row)
        return stages

    def _rows(self) -> Iterator[ResponseRow]:
        for key in sorted(self._kept):
            yield from self._kept[key]
