"""What a frozen front puts out, row by row: in memory first, then on the disk."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from timelyfreeze.control.caching.entries import EntryError, Row
from timelyfreeze.control.caching.folder import EntryFolder, delete
from timelyfreeze.control.caching.writer import BehindWriter

logger = logging.getLogger(__name__)

# Microbatches whose outputs may wait to be stored. Training never waits: one more is not stored,
# and its rows are computed and offered again in the next epoch.
_N_WAITING = 64


class ActivationStore:
    """Outputs of one frozen front, by row.

    Rows that have found room stay until the front changes; later ones are not kept. In epochs that
    read every row once, replacing some by others would only make each come too late.

    Args:
        memory_bytes: Room in memory.
        folder: Takes what does not fit there; None for nothing.

    Attributes:
        memory_used: Bytes of the rows in memory.
        n_refused: Rows that were not stored because the writer was behind.
    """

    def __init__(self, memory_bytes: int, folder: EntryFolder | None) -> None:
        self._memory_bytes = memory_bytes
        self._folder = folder
        self._writer = BehindWriter(_N_WAITING)
        self._in_memory: dict[int, tuple[str, Tensor]] = {}
        self._waiting: set[int] = set()
        self._full = self._disk_failed = self._has_told = False
        self._generation = 0
        self.memory_used = 0
        self.n_refused = 0

    @property
    def disk_used(self) -> int:
        """Bytes of the rows on the disk."""
        return 0 if self._folder is None else self._folder.n_bytes

    def begin(self, front: str | None) -> None:
        """Forget all rows, but keep those of ``front`` that the disk has already.

        Args:
            front: A name that no other front has; None if there is none.
        """
        self._generation += 1
        self._writer.flush()
        self._in_memory, self._waiting = {}, set()
        self.memory_used, self._full = 0, False
        if self._folder is None:
            return
        self._folder.begin(front or "none")
        for other in self._folder.others():
            self._writer.add(partial(delete, other))

    def has(self, row: Row) -> bool:
        """Return whether a row seems to be there."""
        if row.number in self._in_memory:
            return self._in_memory[row.number][0] == row.digest
        return self._folder is not None and row.number in self._folder

    def read(self, row: Row) -> Tensor | None:
        """Return a row's output, on the host; None, and forget it, where it is not whole."""
        if row.number in self._in_memory:
            digest, output = self._in_memory[row.number]
            return output if digest == row.digest else None
        assert self._folder is not None  # the row was there
        try:
            return self._folder.read(row)
        except (EntryError, OSError) as error:
            if not self._has_told:
                self._has_told = True
                logger.warning(
                    "An entry of the activation cache cannot be used: %s; such rows are computed "
                    "and written again, and this is told once",
                    error,
                )
            self._forget(row.number)
            return None

    def offer(self, rows: Sequence[Row], outputs: Tensor) -> int:
        """Store the rows that are missing, behind the training.

        Args:
            rows: Of a microbatch.
            outputs: What the front puts out for them, shape [rows, ...], on any device; copied
                before this returns, or in the order of the device's stream.

        Returns:
            How many rows will be stored.
        """
        wanted = [
            place
            for place, row in enumerate(rows)
            if not self.has(row) and row.number not in self._waiting
        ]
        if not wanted or self._full:
            return 0
        copied, mark = _copied_to_host(outputs)
        chosen = [(rows[place], copied[place]) for place in wanted]
        self._waiting.update(row.number for row, _ in chosen)
        if not self._writer.offer(partial(self._store, chosen, mark, self._generation)):
            self._waiting.difference_update(row.number for row, _ in chosen)
            self.n_refused += len(chosen)
            return 0
        return len(chosen)

    def flush(self) -> None:
        """Wait until all that was offered is stored."""
        self._writer.flush()

    def close(self) -> None:
        """Store what waits, and let others have the folder."""
        self._writer.close()
        if self._folder is not None:
            self._folder.close()

    # -- in the writer's thread --------------------------------------------------------------------

    def _store(self, chosen: Sequence[tuple[Row, Tensor]], mark: object, generation: int) -> None:
        if isinstance(mark, torch.cuda.Event):
            mark.synchronize()
        for row, output in chosen:
            if generation == self._generation:
                self._store_row(row, output)
            self._waiting.discard(row.number)

    def _store_row(self, row: Row, output: Tensor) -> None:
        if self.memory_used + output.nbytes <= self._memory_bytes:
            self._in_memory[row.number] = (row.digest, output.clone())
            self.memory_used += output.nbytes
        elif self._folder is not None and self._folder.has_room(output.nbytes):
            self._write(self._folder, row, output)
        else:
            self._full = True

    def _write(self, folder: EntryFolder, row: Row, output: Tensor) -> None:
        if self._disk_failed:
            return
        try:
            folder.write(row, output)
        except OSError as error:
            self._disk_failed = self._full = True
            logger.warning(
                "The activation cache writes no more files: %s; training goes on, and reads those "
                "that are there",
                error,
            )

    def _forget(self, index: int) -> None:
        assert self._folder is not None  # what is in memory is whole
        try:
            self._folder.drop(index)
        except OSError as error:
            logger.debug("Row %d stays on the disk: %s", index, error)


def _copied_to_host(outputs: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Return a copy on the host, and what to wait for before it is read."""
    outputs = outputs.detach()
    if outputs.device.type != "cuda":
        return outputs.to("cpu", copy=True).contiguous(), None
    host = torch.empty(outputs.shape, dtype=outputs.dtype, pin_memory=True)
    host.copy_(outputs, non_blocking=True)
    mark = torch.cuda.Event()
    mark.record()
    return host, mark
