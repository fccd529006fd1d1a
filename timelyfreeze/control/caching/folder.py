"""The folder in which the processes of a run keep entries: one store for all that can reach it."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from timelyfreeze.control.caching.entries import (
    HEADER_BYTES,
    SUFFIX,
    Entry,
    Row,
    entry_file,
    read_entry,
    write_entry,
)
from timelyfreeze.files import FileLock, is_held
from timelyfreeze.settings import GIB, key


class FolderInUseError(ValueError):
    """Another run keeps its rows in the folder."""


def _lock_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.lock"


def in_use(folder: Path, rank: int) -> bool:
    """Return whether another process is ``rank`` of a run here; leaves nothing behind."""
    return is_held(_lock_file(folder, rank))


def folder_for(folder: Path, rank: int, disk_gib: float) -> EntryFolder | None:
    """Return where a process keeps what does not fit into memory; None if there is no room.

    Raises:
        FolderInUseError: If another run has it open.
        OSError: If it cannot be made.
    """
    return EntryFolder(folder, rank, int(disk_gib * GIB)) if disk_gib > 0.0 else None


class EntryFolder:
    """Entries on the disk, with a folder for each frozen front.

    Each has a file, and is there if the file is, whichever process wrote it. A file may go at any
    time, when another process drops it.

    Args:
        folder: Of the run; processes of other hosts have it too where the disk is theirs as well.
        rank: Number of this process.
        room: Bytes that entries which processes of one host write may take together.

    Attributes:
        n_bytes: What this process's part of the entries takes: of those that were there when it
            began its part, besides those that it wrote since, less those that it dropped.

    Raises:
        FolderInUseError: If a process of another run has it open.
        OSError: If it cannot be made.
    """

    def __init__(self, folder: Path, rank: int, room: int) -> None:
        self._place = folder
        self._unfinished = folder / f"rank_{rank}.part"
        try:
            self._lock = FileLock(_lock_file(folder, rank))
        except BlockingIOError:
            raise FolderInUseError(
                f"{key('cache.folder')} is {str(folder)!r}, which another run uses; name another"
            ) from None
        self._room, self._part = room, 1.0
        self._found: dict[str, list[int]] = {}
        self._counting = threading.Lock()  # one thread writes, another drops
        self.n_bytes = 0

    def fronts(self) -> set[str]:
        """Return the names of the fronts that have a folder."""
        return {place.name for place in self._place.iterdir() if place.is_dir()}

    def begin(self, fronts: Sequence[str], part: float = 1.0) -> list[Path]:
        """Count the entries of ``fronts``; no others are written from now on.

        Args:
            fronts: Names that no others have, weights included.
            part: Of the room, and of what takes it now, that is this process's: 1 over the number
                of processes of its host that write, 0 for one that does not.

        Returns:
            Folders of other fronts, which nobody needs any more.
        """
        sizes = {front: self._sizes(front) for front in fronts}
        self._found = {front: list(of_front) for front, of_front in sizes.items()}
        self._part = part
        self.n_bytes = int(part * sum(sum(of_front.values()) for of_front in sizes.values()))
        return [self._place / name for name in sorted(self.fronts() - sizes.keys())]

    def _sizes(self, front: str) -> dict[int, int]:
        files = (self._place / front).glob(f"*{SUFFIX}")
        return {int(f.stem): _size(f) for f in files if f.stem.isdigit()}

    def has(self, front: str, number: int) -> bool:
        """Return whether there is an entry of a row."""
        return os.path.exists(self._file(front, number))

    def found(self, front: str) -> list[int]:
        """Return, to be emptied, the numbers of rows that had entries when :meth:`begin` looked."""
        return self._found[front]

    def has_room(self, n_bytes: int, n_rows: int = 1) -> bool:
        """Return whether entries of so many bytes, those of ``n_rows``, may be written."""
        return self.n_bytes + n_bytes + n_rows * HEADER_BYTES <= self._part * self._room

    def write(self, front: str, row: Row, output: Tensor) -> None:
        """Write an entry; raises as :func:`write_entry`."""
        before = self.size(front, row.number)
        size = write_entry(self._place / front, row, output, self._unfinished)
        with self._counting:
            self.n_bytes += size - before

    def read(self, front: str, number: int) -> Entry:
        """Read an entry; raises as :func:`read_entry`. Any thread may."""
        return read_entry(self._place / front, number)

    def size(self, front: str, number: int) -> int:
        """Return how many bytes the entry of a row takes, 0 if there is none."""
        return _size(self._file(front, number))

    def drop(self, front: str, number: int) -> None:
        """Delete an entry's file if there is one.

        Raises:
            OSError: If it cannot be deleted.
        """
        size = self.size(front, number)
        with suppress(FileNotFoundError):  # whoever deletes it has its room
            self._file(front, number).unlink()
            with self._counting:
                self.n_bytes -= size

    def close(self) -> None:
        """Let others have the folder."""
        self._lock.close()

    def _file(self, front: str, number: int) -> Path:
        return entry_file(self._place / front, number)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def delete(folder: Path) -> None:
    """Delete a folder of entries; what cannot be deleted stays."""
    shutil.rmtree(folder, ignore_errors=True)
