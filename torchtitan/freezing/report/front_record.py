"""The frozen front of a run as it grows: rows of ``front.csv`` and ``plasticity.csv``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from timelyfreeze.control import ObservedBatch
from timelyfreeze.files import Table
from timelyfreeze.policies import Decision
from timelyfreeze.records import FRONT, PLASTICITY, FrontRow, PlasticityRow
from timelyfreeze.settings import Phase

Row = TypeVar("Row")

# Phases in which a policy's choice is frozen, under a plan or alone.
_IN_FORCE = (Phase.RAMP, Phase.STABLE)


class FrontRecord:
    """Collects what is known of the front and writes it where metrics are logged.

    A file is begun with its first rows: a run whose method freezes no front has none.

    Args:
        folder: Of the run.
        caches: Whether the run keeps what the front puts out.
        writing: What rows are written in.
    """

    def __init__(
        self,
        folder: Path,
        *,
        caches: bool,
        writing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._folder = folder
        self._caches = caches
        self._writing = writing
        self._rows: list[FrontRow] = []
        self._evaluations: list[PlasticityRow] = []
        self._last: Decision | None = None

    def add_batch(self, observed: ObservedBatch) -> None:
        """Take note of a batch, the oldest first."""
        policy = observed.policy
        if "frozen_layers" not in policy:
            return
        read = int(observed.entry_stage is not None) if self._caches else None
        if self._rows and self._rows[-1].step == observed.step:
            row = self._rows[-1]
            read = None if read is None or row.read is None else row.read + read
            self._rows[-1] = replace(row, batches=row.batches + 1, read=read)
            return
        is_in_force = observed.phase in _IN_FORCE
        counts = {
            name: int(policy[name])
            for name in ("frozen_modules", "bootstrapping")
            if name in policy
        }
        frozen_layers = int(policy["frozen_layers"]) if is_in_force else 0
        self._rows.append(
            FrontRow(observed.step, observed.phase.value, frozen_layers, 1, read, **counts)
        )

    def end_step(self, decision: Decision | None) -> None:
        """Take note of what the policy, if there is one, has decided last."""
        if decision is None or decision is self._last:
            return
        self._last = decision
        self._evaluations += [
            PlasticityRow(found.step, found.module, found.value, found.smoothed)
            for found in decision.evaluations
        ]

    def write(self) -> None:
        """Write what has been collected; times of all batches so far have been read."""
        rows, self._rows = self._rows, []
        evaluations, self._evaluations = self._evaluations, []
        with self._writing():
            if rows:
                _add(FRONT, self._folder, rows)
            if evaluations:
                _add(PLASTICITY, self._folder, evaluations)


def _add(table: Table[Row], folder: Path, rows: list[Row]) -> None:
    if (folder / table.name).exists():
        table.append(folder, rows)
    else:
        table.write(folder, rows)
