"""The folder that one process keeps entries in: its own, with a folder for each frozen front."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections.abc import Sequence
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
from timelyfreeze.settings import GIB, key

_LOCK = "lock"


class FolderInUseError(ValueError):
    """Another run keeps its rows in the folder."""


def process_folder(folder: Path, rank: int) -> Path:
    """Return where a process keeps its rows."""
    return folder / f"rank_{rank}"


def in_use(folder: Path, rank: int) -> bool:
    """Return whether another process holds the folder of ``rank``; leaves nothing behind."""
    try:
        descriptor = os.open(process_folder(folder, rank) / _LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def folder_for(folder: Path, rank: int, disk_gib: float) -> EntryFolder | None:
    """Return where a process keeps what does not fit into memory; None if it gets no room.

    Raises:
        FolderInUseError: If another run has it open.
        OSError: If it cannot be made.
    """
    return EntryFolder(folder, rank, int(disk_gib * GIB)) if disk_gib > 0.0 else None


class EntryFolder:
    """Entries on the disk.

    Args:
        folder: Of the run; this process has a folder below it.
        rank: Number of this process.
        room: Bytes that entries may take together.

    Attributes:
        n_bytes: What they take.

    Raises:
        FolderInUseError: If another process has it open.
        OSError: If it cannot be made.
    """

    def __init__(self, folder: Path, rank: int, room: int) -> None:
        self._place = process_folder(folder, rank)
        self._place.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._place / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise FolderInUseError(
                f"{key('cache.folder')} is {str(folder)!r}, which another run uses; name another"
            ) from None
        self._room = room
        self._sizes: dict[str, dict[int, int]] = {}
        self._counting = threading.Lock()  # one thread writes, another drops
        self.n_bytes = 0

    def begin(self, fronts: Sequence[str]) -> list[Path]:
        """Hold entries of ``fronts`` from now on, those that are there already included.

        Args:
            fronts: Names that no others have, weights included.

        Returns:
            Folders of other fronts, which nobody needs any more.
        """
        self._sizes = {front: self._sizes.get(front) or self._found(front) for front in fronts}
        self.n_bytes = sum(sum(sizes.values()) for sizes in self._sizes.values())
        places = [place for place in sorted(self._place.iterdir()) if place.is_dir()]
        return [place for place in places if place.name not in self._sizes]

    def _found(self, front: str) -> dict[int, int]:
        files = (self._place / front).glob(f"*{SUFFIX}")
        return {int(f.stem): f.stat().st_size for f in files if f.stem.isdigit()}

    def has(self, front: str, number: int) -> bool:
        """Return whether there is an entry of a row."""
        return number in self._sizes[front]

    def numbers(self, front: str) -> list[int]:
        """Return the numbers of the rows that have entries."""
        return list(self._sizes[front])

    def has_room(self, n_bytes: int, n_rows: int = 1) -> bool:
        """Return whether entries of so many bytes, those of ``n_rows``, may be written."""
        return self.n_bytes + n_bytes + n_rows * HEADER_BYTES <= self._room

    def write(self, front: str, row: Row, output: Tensor) -> None:
        """Write an entry; raises as :func:`write_entry`."""
        size = write_entry(self._place / front, row, output)
        with self._counting:
            self.n_bytes += size - self._sizes[front].get(row.number, 0)
            self._sizes[front][row.number] = size

    def read(self, front: str, number: int) -> Entry:
        """Read an entry; raises as :func:`read_entry`. Any thread may."""
        return read_entry(self._place / front, number)

    def size(self, front: str, number: int) -> int:
        """Return how many bytes the entry of a row takes, 0 if there is none."""
        return self._sizes[front].get(number, 0)

    def drop(self, front: str, number: int) -> None:
        """Forget an entry, and delete its file if there is one.

        Raises:
            OSError: If it cannot be deleted.
        """
        with self._counting:
            size = self._sizes[front].pop(number, None)
            self.n_bytes -= size or 0
        if size is not None:
            entry_file(self._place / front, number).unlink(missing_ok=True)

    def close(self) -> None:
        """Let others have the folder."""
        os.close(self._lock)


def delete(folder: Path) -> None:
    """Delete a folder of entries; what cannot be deleted stays."""
    shutil.rmtree(folder, ignore_errors=True)
