"""The folder that one process keeps entries in: its own, and of one frozen front at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from timelyfreeze.control.caching.entries import SUFFIX, Row, entry_file, read_entry, write_entry
from timelyfreeze.settings import key

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
        self._front: Path | None = None
        self._sizes: dict[int, int] = {}
        self.n_bytes = 0

    def begin(self, front: str) -> None:
        """Hold entries of ``front`` from now on, those that are there already included.

        Args:
            front: A name that no other front has, weights included.
        """
        self._front = self._place / front
        files = self._front.glob(f"*{SUFFIX}") if self._front.is_dir() else ()
        self._sizes = {int(f.stem): f.stat().st_size for f in files if f.stem.isdigit()}
        self.n_bytes = sum(self._sizes.values())

    def others(self) -> Iterator[Path]:
        """Yield the folders of other fronts, which nobody needs any more."""
        for place in sorted(self._place.iterdir()):
            if place.is_dir() and place != self._front:
                yield place

    def __contains__(self, index: int) -> bool:
        """Return whether there is an entry of a row."""
        return index in self._sizes

    def has_room(self, n_bytes: int) -> bool:
        """Return whether an entry of so many bytes may be written."""
        return self.n_bytes + n_bytes <= self._room

    def write(self, row: Row, output: Tensor) -> None:
        """Write an entry; raises as :func:`write_entry`."""
        assert self._front is not None  # the store has begun
        size = write_entry(self._front, row, output)
        self.n_bytes += size - self._sizes.get(row.number, 0)
        self._sizes[row.number] = size

    def read(self, row: Row) -> Tensor:
        """Read an entry; raises as :func:`read_entry`."""
        assert self._front is not None  # likewise
        return read_entry(self._front, row)

    def drop(self, index: int) -> None:
        """Forget an entry."""
        assert self._front is not None  # likewise
        self.n_bytes -= self._sizes.pop(index, 0)
        entry_file(self._front, index).unlink(missing_ok=True)

    def close(self) -> None:
        """Let others have the folder."""
        os.close(self._lock)


def delete(folder: Path) -> None:
    """Delete a folder of entries; what cannot be deleted stays."""
    shutil.rmtree(folder, ignore_errors=True)
