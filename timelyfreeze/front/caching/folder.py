"""The folder of a run's stored entries: a store shared by all processes with access."""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from timelyfreeze.files import FileLock, is_held, write_whole
from timelyfreeze.settings import GIB, key


def in_use(folder: Path, rank: int) -> bool:
    """Return whether another process is ``rank`` of a run here; leaves nothing behind."""
    return is_held(folder / f"rank_{rank}.lock")


def folder_for(folder: Path, rank: int, disk_gib: float) -> EntryFolder | None:
    """Return the folder of a process for entries beyond its memory; None without room."""
    return EntryFolder(folder, rank, int(disk_gib * GIB)) if disk_gib > 0.0 else None


# Room in memory for entries that are read ahead.
_AHEAD_BYTES = 1 << 30


class EntryFolder:
    """Entries on the disk, a folder per frozen front, and a thread reading ahead.

    An entry is a file, written by any process and possibly dropped by another at any time. The
    folder is the run's, shared with other hosts where the disk is. ``room`` bounds the bytes
    written by a host's processes together; ``n_bytes`` are those of this process's part: entries
    found at its begin, plus entries written since, less dropped entries.

    Entries read by the thread stay in host memory until asked for or no longer wanted. Nobody waits
    for the thread: missing entries are read at once.
    """

    def __init__(self, folder: Path, rank: int, room: int) -> None:
        self._place = folder
        self._unfinished = folder / f"rank_{rank}.part"
        try:
            self._lock = FileLock(folder / f"rank_{rank}.lock")
        except BlockingIOError:
            raise ValueError(
                f"{key('cache.folder')} is {str(folder)!r}, which another run uses; name another"
            ) from None
        self._room, self._part = room, 1.0
        self._found: dict[str, list[int]] = {}
        self._counting = threading.Lock()  # one thread writes, another drops
        self.n_bytes = 0
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="cache-reader")
        self._reads: dict[tuple[str, int], Future[Entry]] = {}  # by front and number of a row
        self._ahead_room = _AHEAD_BYTES
        self.n_ahead = 0  # entries that were there when they were asked for

    def fronts(self) -> set[str]:
        """Return the names of the fronts with a folder."""
        return {place.name for place in self._place.iterdir() if place.is_dir()}

    def begin(self, fronts: Sequence[str], part: float = 1.0) -> list[Path]:
        """Count the entries of ``fronts``; no others are written from now on.

        ``part`` of the room and its present use is this process's: 1 over the number of the host's
        writing processes, 0 for other processes. Returns the useless folders of other fronts.
        """
        self.want(())
        sizes: dict[str, dict[int, int]] = {}
        for front in fronts:
            files = (self._place / front).glob(f"*{SUFFIX}")
            sizes[front] = {int(f.stem): _size(f) for f in files if f.stem.isdigit()}
        self._found = {front: list(of_front) for front, of_front in sizes.items()}
        self._part = part
        self.n_bytes = int(part * sum(sum(of_front.values()) for of_front in sizes.values()))
        return [self._place / name for name in sorted(self.fronts() - sizes.keys())]

    def has(self, front: str, number: int) -> bool:
        """Return whether there is an entry of a row."""
        return os.path.exists(entry_file(self._place / front, number))

    def found(self, front: str) -> list[int]:
        """Return the rows with entries at :meth:`begin`, to be emptied by the caller."""
        return self._found[front]

    def has_room(self, n_bytes: int, n_rows: int = 1) -> bool:
        """Return whether entries of ``n_rows`` rows and so many bytes may be written."""
        return self.n_bytes + n_bytes + n_rows * HEADER_BYTES <= self._part * self._room

    def write(self, front: str, row: Row, output: Tensor) -> None:
        """Write an entry; raises as :func:`write_entry`."""
        before = self.size(front, row.number)
        size = write_entry(self._place / front, row, output, self._unfinished)
        with self._counting:
            self.n_bytes += size - before

    def read(self, front: str, number: int) -> Entry:
        """Return an entry, from memory or disk; raises as :func:`read_entry`."""
        read = self._reads.pop((front, number), None)
        if read is None or read.cancel() or not read.done():
            return read_entry(self._place / front, number)
        entry = read.result()
        self.n_ahead += 1
        return entry

    def want(self, places: Iterable[tuple[str, int]]) -> None:
        """Read entries of these fronts and rows next, as far as there is room; forget others."""

        def read(front: str, number: int) -> Entry:
            return read_entry(self._place / front, number).copied()

        wanted, room = [], self._ahead_room
        for place in places:
            if (room := room - self.size(*place)) < 0:
                break
            wanted.append(place)
        for place in self._reads.keys() - set(wanted):
            self._reads.pop(place).cancel()
        for place in wanted:
            if place not in self._reads:
                self._reads[place] = self._reader.submit(read, *place)

    def size(self, front: str, number: int) -> int:
        """Return how many bytes the entry of a row takes, 0 if there is none."""
        return _size(entry_file(self._place / front, number))

    def drop(self, front: str, number: int) -> None:
        """Delete an entry's file, if any."""
        if (read := self._reads.pop((front, number), None)) is not None:
            read.cancel()
        size = self.size(front, number)
        with suppress(FileNotFoundError):  # whoever deletes it has its room
            entry_file(self._place / front, number).unlink()
            with self._counting:
                self.n_bytes -= size

    def close(self) -> None:
        """Release the folder, once the thread has finished its present entry."""
        self.want(())
        self._reader.shutdown()
        self._lock.close()


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


SUFFIX = ".safetensors"
HEADER_BYTES = 256  # more than a file has besides the output
_OUTPUT = "output"


class Row(NamedTuple):
    """A row of the data set."""

    number: int  # its index in the data set
    # of its tokens, so that an index of another data set, another tokenizer or another length is
    # another row
    digest: str


class EntryError(ValueError):
    """A file is no whole entry of the row."""


class Entry(NamedTuple):
    """Header and content of a file."""

    row: Row  # in a foreign file of any types
    # what a frozen front puts out for it; as long as it is used, the file must be whole
    output: Tensor

    def of(self, row: Row) -> Tensor:
        """Return the output."""
        if self.row != row:
            raise EntryError(f"{row.number}{SUFFIX} is the entry of another row")
        return self.output

    def copied(self) -> Entry:
        """Return the entry in memory of its own, whatever becomes of the file."""
        # Not by torch: a thread that it computes in has its own threads to help.
        data = torch.from_numpy(self.output.flatten().view(torch.uint8).numpy().copy())
        return Entry(self.row, data.view(self.output.dtype).view(self.output.shape))


def entry_file(folder: Path, index: int) -> Path:
    """Return the file of a row."""
    return folder / f"{index}{SUFFIX}"


def write_entry(folder: Path, row: Row, output: Tensor, unfinished: Path | None = None) -> int:
    """Write a frozen front's output for a row; readers see all of the file or none.

    The output is on the host, contiguous; ``unfinished`` is as of :func:`write_whole`. Returns the
    size of the file in bytes.
    """
    from safetensors.torch import save

    about = {"row": row.number, "digest": row.digest, "crc32": _crc32(output)}
    content = save({_OUTPUT: output}, {"entry": json.dumps(about)})
    write_whole(entry_file(folder, row.number), content, unfinished)
    return len(content)


def read_entry(folder: Path, number: int) -> Entry:
    """Return the entry of :func:`write_entry` for a number; EntryError for a damaged file."""
    from safetensors import SafetensorError, safe_open

    file = entry_file(folder, number)
    try:
        with safe_open(file, framework="pt") as opened:
            about: Any = json.loads((opened.metadata() or {})["entry"])
            output: Tensor = opened.get_tensor(_OUTPUT)
        row, checksum = Row(about["row"], about["digest"]), about["crc32"]
    except (SafetensorError, LookupError, ValueError, TypeError, RecursionError) as error:
        raise EntryError(f"{file.name} is cut or no entry ({error})") from error
    if checksum != _crc32(output):
        raise EntryError(f"{file.name} is damaged: its checksum is wrong")
    return Entry(row, output)


def _crc32(output: Tensor) -> int:
    return zlib.crc32(output.flatten().view(torch.uint8).numpy())
