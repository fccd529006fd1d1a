"""Outputs of a frozen front, row by row: in memory first, then on the disk."""

import logging
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from timelyfreeze.front.caching.folder import EntryError, EntryFolder, Row
from timelyfreeze.runtime.shards import copied, copy_to_host

logger = logging.getLogger(__name__)

# Microbatches whose outputs may wait to be stored. Training never waits: one more is not stored,
# and its rows are computed and offered again in the next epoch.
_N_WAITING = 64


class ActivationStore:
    """Outputs of a frozen front by row, and those of its shallower predecessors.

    Stored rows of the front stay until the front changes; later rows find no room. In epochs of
    single reads, replacement would only make every row come too late. Rows of the shallowest fronts
    are dropped first.
    """

    def __init__(self, memory_bytes: int, folder: EntryFolder | None) -> None:
        self._memory_bytes = memory_bytes
        self._folder = folder
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="cache-writer")
        self._offered: list[Future[None]] = []
        self._front: str | None = None
        self._older: list[str] = []
        self._in_memory: dict[str, dict[int, tuple[str, Tensor]]] = {}
        self._waiting: set[int] = set()
        self._disk_failed = self._has_told = False
        self._counting = threading.Lock()  # one thread stores, another drops
        self.memory_used = 0  # bytes of the rows in memory

    @property
    def n_ahead(self) -> int:
        """Rows of the disk already in memory when read."""
        return 0 if self._folder is None else self._folder.n_ahead

    @property
    def disk_used(self) -> int:
        """Bytes of the rows on the disk."""
        return 0 if self._folder is None else self._folder.n_bytes

    def fronts(self) -> set[str]:
        """Return the names of the stored fronts."""
        return {*self._in_memory, *(() if self._folder is None else self._folder.fronts())}

    def begin(self, front: str | None, older: Sequence[str] = (), part: float = 1.0) -> None:
        """Store rows of ``front`` from now on.

        Forget all rows of unnamed fronts. Rows of ``older`` fronts, the shallowest last, may still
        be read; ``part`` is as of :meth:`EntryFolder.begin`.
        """
        self._front = None  # what waits is not stored
        self.flush()
        fronts = [*([] if front is None else [front]), *older]
        self._in_memory = {name: self._in_memory.get(name, {}) for name in fronts}
        in_memory = [kept for rows in self._in_memory.values() for _, kept in rows.values()]
        self.memory_used = sum(output.nbytes for output in in_memory)
        self._waiting = set()
        if self._folder is not None:
            for other in self._folder.begin(fronts, part):
                # What cannot be deleted stays.
                self._writer.submit(shutil.rmtree, other, ignore_errors=True)
        self._front, self._older = front, list(older)

    def has(self, front: str, row: Row) -> bool:
        """Return whether a row of a stored front seems available."""
        kept = self._in_memory[front].get(row.number)
        if kept is not None:
            return kept[0] == row.digest
        return self._folder is not None and self._folder.has(front, row.number)

    def read(self, front: str, row: Row) -> Tensor | None:
        """Return a row's output, on the host; None for a damaged row, which is dropped."""
        kept = self._in_memory[front].get(row.number)
        if kept is not None:
            return kept[1] if kept[0] == row.digest else None
        if self._folder is None:
            return None
        try:
            return self._folder.read(front, row.number).of(row)
        except FileNotFoundError:  # another process has dropped it
            return None
        except (EntryError, OSError) as error:
            if not self._has_told:
                self._has_told = True
                logger.warning(
                    "An entry of the activation cache cannot be used: %s; such rows are computed "
                    "and written again, and this is told once",
                    error,
                )
            self.drop(front, row.number)
            return None

    def read_ahead(self, fronts: Sequence[str], batches: Sequence[Sequence[int]]) -> None:
        """Have rows of the disk read behind the training.

        Rows stay in memory until read from here or left out by the next call. A batch is read from
        the first of ``fronts`` with all of its rows, if any.
        """
        if self._folder is None:
            return
        chosen = [(self._front_of(fronts, batch), batch) for batch in batches]
        places = [(front, number) for front, batch in chosen if front for number in batch]
        self._folder.want(
            (front, number) for front, number in places if number not in self._in_memory[front]
        )

    def drop(self, front: str, number: int) -> None:
        """Forget a row of a stored front, if there."""
        with self._counting:
            kept = self._in_memory[front].pop(number, None)
            self.memory_used -= 0 if kept is None else kept[1].nbytes
        if self._folder is not None:
            try:
                self._folder.drop(front, number)
            except OSError as error:
                logger.debug("Row %d stays on the disk: %s", number, error)

    def offer(self, rows: Sequence[Row], outputs: Tensor) -> int:
        """Store missing rows of the front, behind the training.

        Outputs, shape [rows, ...], are copied before the return, or in the order of the device's
        stream. Returns the number of rows to be stored.
        """
        front = self._front
        if front is None:
            return 0
        missing = {  # a row may come twice
            row.number: place
            for place, row in enumerate(rows)
            if not self.has(front, row) and row.number not in self._waiting
        }
        wanted = list(missing.values())
        row_bytes = outputs.nbytes // len(rows)
        if wanted and self._older:
            self._make_room(row_bytes, len(wanted))
        has_room = self.memory_used + row_bytes <= self._memory_bytes
        if not wanted or not (has_room or self._disk_has_room(row_bytes)):
            return 0
        self._offered = [job for job in self._offered if not job.done()]
        if len(self._offered) >= _N_WAITING:
            return 0
        there, mark = copy_to_host(outputs).contiguous(), copied(outputs)
        chosen = [(rows[place], there[place]) for place in wanted]
        self._waiting.update(missing)
        self._offered.append(self._writer.submit(self._store, front, chosen, mark))
        return len(chosen)

    def flush(self) -> None:
        """Wait until all offered rows are stored."""
        self._writer.submit(lambda: None).result()

    def hand_over(self) -> None:
        """Write rows in memory alone to the folder, as far as there is room."""
        self.flush()
        for front, rows in self._in_memory.items():
            for number, (digest, output) in rows.items():
                self._write(front, Row(number, digest), output)

    def close(self) -> None:
        """Store waiting rows, and release the folder."""
        self._writer.shutdown()
        if self._folder is not None:
            self._folder.close()

    def _front_of(self, fronts: Sequence[str], batch: Sequence[int]) -> str | None:
        """Return the first front with all rows of a batch."""

        def has(front: str, number: int) -> bool:
            on_disk = self._folder is not None and self._folder.has(front, number)
            return on_disk or number in self._in_memory[front]

        return next((f for f in fronts if all(has(f, number) for number in batch)), None)

    def _make_room(self, row_bytes: int, n_rows: int) -> None:
        """Drop rows of shallower fronts, the shallowest first, until so many more find room."""

        def fits_in_memory() -> bool:
            with self._counting:  # a row that the writer stores meanwhile counts once
                needed = self.memory_used + row_bytes * (n_rows + len(self._waiting))
                return needed <= self._memory_bytes

        for front in reversed(self._older):
            rows = self._in_memory[front]
            while rows and not fits_in_memory():
                self.drop(front, next(iter(rows)))
        if self._folder is None or fits_in_memory():
            return
        for front in reversed(self._older):
            numbers = self._folder.found(front)
            while numbers:
                n_all = n_rows + len(self._waiting)
                if self._folder.has_room(row_bytes * n_all, n_all):
                    break
                self.drop(front, numbers.pop())

    # -- in the writer's thread --------------------------------------------------------------------

    def _store(self, front: str, chosen: Sequence[tuple[Row, Tensor]], mark: object) -> None:
        try:
            if isinstance(mark, torch.cuda.Event):
                mark.synchronize()
            for row, output in chosen:
                if front == self._front and not self._store_in_memory(front, row, output):
                    self._write(front, row, output)
                self._waiting.discard(row.number)
        except Exception:
            logger.exception("The writer of the activation cache goes on after an error")

    def _disk_has_room(self, n_bytes: int) -> bool:
        return self._folder is not None and not self._disk_failed and self._folder.has_room(n_bytes)

    def _store_in_memory(self, front: str, row: Row, output: Tensor) -> bool:
        """Store a waiting row in memory; return whether there was room."""
        with self._counting:
            if self.memory_used + output.nbytes > self._memory_bytes:
                return False
            rows = self._in_memory[front]
            before = rows.get(row.number)  # its output for other tokens
            self.memory_used += output.nbytes - (0 if before is None else before[1].nbytes)
            rows[row.number] = (row.digest, output.clone())
            self._waiting.discard(row.number)
            return True

    def _write(self, front: str, row: Row, output: Tensor) -> None:
        if self._folder is None or not self._disk_has_room(output.nbytes):
            return
        try:
            self._folder.write(front, row, output)
        except FileNotFoundError:
            pass  # another process deletes the folder of the front, which nobody needs any more
        except OSError as error:
            self._disk_failed = True
            logger.warning(
                "The activation cache writes no more files: %s; training goes on, and reads those "
                "that are there",
                error,
            )
