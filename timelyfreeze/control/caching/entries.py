"""One row's output of a frozen front as a file: written whole, and checked whenever it is read."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from timelyfreeze.files import write_whole

SUFFIX = ".safetensors"
HEADER_BYTES = 256  # more than a file has besides the output
_OUTPUT = "output"


class Row(NamedTuple):
    """A row of the data set.

    Attributes:
        number: Its index in the data set.
        digest: Of its tokens, so that an index of another data set, another tokenizer or another
            length is another row.
    """

    number: int
    digest: str


class EntryError(ValueError):
    """A file is no whole entry of the row."""


class Entry(NamedTuple):
    """What a file says of itself, and what it holds.

    Attributes:
        row: The row; in a foreign file of any types.
        output: What a frozen front puts out for it; as long as it is used, the file must be whole.
    """

    row: Row
    output: Tensor

    def of(self, row: Row) -> Tensor:
        """Return the output.

        Raises:
            EntryError: If this is the entry of another row.
        """
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
    """Write what a frozen front puts out for a row; readers see all of the file or none.

    Args:
        folder: Of one front; made if it is not there.
        row: The row.
        output: On the host, contiguous, of any shape and type.
        unfinished: As of :func:`write_whole`.

    Returns:
        int: Size of the file in bytes.

    Raises:
        OSError: If it cannot be written.
    """
    from safetensors.torch import save

    about = {"row": row.number, "digest": row.digest, "crc32": _crc32(output)}
    content = save({_OUTPUT: output}, {"entry": json.dumps(about)})
    write_whole(entry_file(folder, row.number), content, unfinished)
    return len(content)


def read_entry(folder: Path, number: int) -> Entry:
    """Return what :func:`write_entry` wrote for the row of a number, if :meth:`Entry.of` agrees.

    Raises:
        EntryError: If the file is cut or damaged; says which.
        OSError: If it cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    file = entry_file(folder, number)
    try:
        with safe_open(file, framework="pt") as opened:
            about: Any = json.loads((opened.metadata() or {})["entry"])
            output: Tensor = opened.get_tensor(_OUTPUT)
    except (SafetensorError, LookupError, ValueError, TypeError, RecursionError) as error:
        raise EntryError(f"{file.name} is cut or no entry ({error})") from error
    if not isinstance(about, dict):
        raise EntryError(f"{file.name} is no entry ({about!r})")
    if about.get("crc32") != _crc32(output):
        raise EntryError(f"{file.name} is damaged: its checksum is wrong")
    return Entry(Row(about.get("row", -1), about.get("digest", "")), output)


def _crc32(output: Tensor) -> int:
    return zlib.crc32(output.flatten().view(torch.uint8).numpy())
