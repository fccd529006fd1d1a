"""Records the batches of an emulated pipeline with the time they would have taken on N devices."""

from __future__ import annotations

from dataclasses import dataclass

from timelyfreeze.emulation.turns import virtual_batch
from timelyfreeze.runtime import ActionRecorder, Clock
from timelyfreeze.schedule import ScheduleOrder, build_dag
from timelyfreeze.timing import BatchRecord


@dataclass(frozen=True)
class EmulatedBatch:
    """What one batch took; milliseconds.

    Attributes:
        virtual_ms: With a device for each rank, by the virtual clock.
        real_ms: Here, one action after the other.
    """

    virtual_ms: float
    real_ms: float


class EmulatedRecorder(ActionRecorder):
    """Times the actions of all ranks of a pipeline, which run here one at a time.

    A record's span and intervals are the virtual clock's: since the batch's first action, as on
    devices of their own. What the batch really took is kept beside it.

    Args:
        clock: Takes the marks.
        order: Declared order of the pipeline.
    """

    def __init__(self, clock: Clock, order: ScheduleOrder) -> None:
        super().__init__(clock)
        self._dag = build_dag(order)
        self._batches: list[EmulatedBatch] = []

    def drain(self) -> list[BatchRecord]:
        """Hand out what was recorded, as :meth:`ActionRecorder.drain`, with virtual spans."""
        records = []
        for record in super().drain():
            virtual = virtual_batch(self._dag, record.durations_ms)
            self._batches.append(EmulatedBatch(virtual.batch_ms, record.span_ms))
            records.append(BatchRecord(record.durations_ms, virtual.batch_ms, virtual.intervals_ms))
        return records

    def take_batches(self) -> list[EmulatedBatch]:
        """Return what the batches drained since the last call took, oldest first."""
        batches, self._batches = self._batches, []
        return batches
