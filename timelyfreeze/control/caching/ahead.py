"""Rows that are read from the disk before they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from timelyfreeze.control.caching.entries import Entry
from timelyfreeze.control.caching.folder import EntryFolder

Place = tuple[str, int]  # a front, and the number of a row


class AheadReader:
    """Reads entries of a folder, and has a thread that reads those that will be asked for.

    What the thread has read stays in host memory until it is asked for or no longer wanted. Nobody
    waits for the thread: what it has not read by then is read where it is asked for.

    Args:
        folder: Where entries are.
        room: Bytes of the files that are wanted at a time.

    Attributes:
        n_ahead: Entries that were there when they were asked for.
    """

    def __init__(self, folder: EntryFolder, room: int) -> None:
        self._folder = folder
        self._room = room
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache-reader")
        self._reads: dict[Place, Future[Entry]] = {}
        self.n_ahead = 0

    def want(self, places: Iterable[Place]) -> None:
        """Read these entries next, in this order, and forget all others.

        Those for which there is no room are left out.
        """
        wanted = dict.fromkeys(self._with_room(places))
        for place in [place for place in self._reads if place not in wanted]:
            self.forget(*place)
        for place in wanted:
            if place not in self._reads:
                self._reads[place] = self._thread.submit(self._read, *place)

    def read(self, front: str, number: int) -> Entry:
        """Return an entry; raises as :func:`read_entry`, wherever it was read."""
        read = self._reads.pop((front, number), None)
        if read is None or read.cancel() or not read.done():
            return self._folder.read(front, number)
        entry = read.result()
        self.n_ahead += 1
        return entry

    def forget(self, front: str, number: int) -> None:
        """Neither read an entry nor keep what was read."""
        if (read := self._reads.pop((front, number), None)) is not None:
            read.cancel()

    def close(self) -> None:
        """Forget all, and end the thread when it has read what it reads now."""
        self.want(())
        self._thread.shutdown()

    def _with_room(self, places: Iterable[Place]) -> Iterator[Place]:
        room = self._room
        for place in places:
            room -= self._folder.size(*place)
            if room < 0:
                return
            yield place

    def _read(self, front: str, number: int) -> Entry:
        return self._folder.read(front, number).copied()
