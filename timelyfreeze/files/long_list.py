"""A list in a JSON file that may be too long for memory, item by item; gzipped or not."""

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from timelyfreeze.files.schema import shown

_CHUNK = 2**20  # characters read at once; the list must begin within the first
_MOST_ITEM = 2**24  # characters of an item
MOST_CHARACTERS = 2**30  # of a file, unpacked
_BETWEEN = re.compile(r"[\s,]*")


def has_list(path: Path, key: str) -> bool:
    """Return whether a file seems to have the list ``key``, by its beginning."""
    try:
        with _opened(path) as file:
            return _opening(key).search(file.read(_CHUNK)) is not None
    except ValueError:
        return False


def items_of(path: Path, key: str) -> Iterator[Any]:
    """Yield the items of the list ``key`` of the object in a file.

    Raises:
        ValueError: If it cannot be read, has no such list, or is too large; does not name the file.
    """
    decode, n_read, place = json.JSONDecoder().raw_decode, 0, 0
    with _opened(path) as file:
        text = file.read(_CHUNK)
        opening = _opening(key).search(text)
        if opening is None:
            raise ValueError(f'no list "{key}" is in its beginning')
        place = opening.end()
        while True:
            between = _BETWEEN.match(text, place)
            place = place if between is None else between.end()
            if text.startswith("]", place):
                return
            try:
                item, place = decode(text, place)
            except RecursionError:
                raise ValueError(f"an item of {key} is nested too deeply") from None
            except ValueError:  # it may go on in the next chunk
                n_read += len(more := file.read(_CHUNK))
                rest = text[place:]
                if not more or len(rest) > _MOST_ITEM:
                    cut = f"of at most {_MOST_ITEM} characters" if more else "or was cut off"
                    raise ValueError(
                        f"an item of {key} is no JSON {cut}: {shown(rest[:40])}"
                    ) from None
                if n_read > MOST_CHARACTERS:
                    most = f"at most {MOST_CHARACTERS >> 20} MiB, unpacked"
                    raise ValueError(f"it is too large to read, {most}; record less") from None
                text, place = rest + more, 0
                continue
            yield item


def _opening(key: str) -> re.Pattern[str]:
    return re.compile(rf'"{key}"\s*:\s*\[')


@contextmanager
def _opened(path: Path) -> Iterator[io.TextIOBase]:
    """Open a file as text; every fault of reading is a ValueError."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            binary = gzip.GzipFile(fileobj=raw) if packed else raw
            yield io.TextIOWrapper(binary, "utf-8", errors="replace")
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"it cannot be read: {error}") from error
