"""This rank's batches: what they froze, what they took, and what of it has not been told yet."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.control.collected import (
    Applied,
    BatchSummary,
    Cut,
    ObservedBatch,
    ratios_by_action,
)
from timelyfreeze.runtime import ActionRecorder
from timelyfreeze.settings import Phase
from timelyfreeze.timing import BatchRecord, Pattern, misreading, rank_batches

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoggedBatch:
    """What is known of a batch before its times are read.

    Attributes:
        step: Optimizer step it was part of.
        phase: What the step was for.
        pattern: What it froze, if it was a batch of monitoring.
        is_cold: Whether it is one of the first batches after a change of phase or of plan.
        applied: What its masks really froze.
        cut: Microbatches whose input gradients were left out.
        entry_stage: As in ``ObservedBatch``; ``policy`` too.
    """

    step: int
    phase: Phase
    pattern: Pattern | None
    is_cold: bool
    applied: Applied
    cut: Cut
    entry_stage: int | None = None
    policy: Mapping[str, float] = field(default_factory=dict)


class BatchLog:
    """Keeps batches until their times are read, and their times until they are told.

    Args:
        recorder: Has the times.
        rank: Number of this process, for warnings.
    """

    def __init__(self, recorder: ActionRecorder, rank: int) -> None:
        self._recorder = recorder
        self._rank = rank
        self._unread: list[LoggedBatch] = []
        self._untold: list[tuple[Phase, BatchRecord]] = []
        self._step_applied: dict[int, list[float]] = {}
        self._has_misread = False
        self._mask_hashes: dict[int, int] = {}

    def begin_step(self) -> None:
        """Enter an optimizer step."""
        self._step_applied = {}

    def add(self, logged: LoggedBatch) -> None:
        """Take note of a batch that the recorder has just finished."""
        self._unread.append(logged)
        for stage, fractions in logged.applied.items():
            self._step_applied.setdefault(stage, []).extend(fractions.values())

    def add_masks(self, masks: Mapping[int, Mapping[int, NDArray[np.bool_]]]) -> None:
        """Take note of what a batch is to freeze, by stage and microbatch."""
        for stage, of_stage in masks.items():
            mask_hash = self._mask_hashes.get(stage, 0)
            for microbatch, mask in sorted(of_stage.items()):
                mask_hash = crc32(mask.tobytes(), crc32(b"%d" % microbatch, mask_hash))
            self._mask_hashes[stage] = mask_hash

    def read(self) -> list[tuple[ObservedBatch, Pattern | None]]:
        """Wait for the device and return the batches since the last call, oldest first.

        With each comes what it froze if it was one of monitoring.
        """
        found = []
        for logged, record in zip(self._unread, self._recorder.drain(), strict=True):
            self._tell_misreading(logged, record)
            fractions = ratios_by_action(record, logged.applied)
            # A first stage has no input gradient to leave out.
            was_cut = {a for a in fractions if a.stage and a.microbatch in logged.cut[a.stage]}
            observed = ObservedBatch(
                logged.step,
                logged.phase,
                logged.is_cold,
                record,
                fractions,
                was_cut,
                logged.entry_stage,
                logged.policy,
            )
            found.append((observed, logged.pattern))
            if not logged.is_cold:
                self._untold.append((logged.phase, record))
        self._unread = []
        return found

    def take(self) -> BatchSummary:
        """Return what has been read since the last call."""
        untold, self._untold = self._untold, []
        mask_hashes, self._mask_hashes = self._mask_hashes, {}
        return BatchSummary(
            rank_batches([(phase, each.durations_ms, each.span_ms) for phase, each in untold]),
            {phase for phase, _ in untold},
            {stage: sum(s) / len(s) for stage, s in self._step_applied.items() if s},
            mask_hashes,
        )

    def forget_stable(self) -> None:
        """Leave out what ran under a plan that another one follows."""
        self._untold = [entry for entry in self._untold if entry[0] is not Phase.STABLE]

    def _tell_misreading(self, logged: LoggedBatch, record: BatchRecord) -> None:
        """Warn once of a time that cannot be; where a plan fails by it, that is told anyway."""
        told = misreading(record.durations_ms, record.span_ms)
        if told is None or logged.pattern is not None or self._has_misread:
            return
        self._has_misread = True
        logger.warning(
            "Rank %d: a clock misread in step %d: %s; batch times are left out wherever such a "
            "time would be part of them, and no plan is made by them",
            self._rank,
            logged.step,
            told,
        )
