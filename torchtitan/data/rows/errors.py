"""Errors of data: file, example, field."""

import gzip
import zlib
from collections.abc import Sequence
from io import BufferedIOBase
from typing import Any

_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a truth value",
    int: "a number",
    float: "a number",
    type(None): "null",
}


BOM = b"\xef\xbb\xbf"  # which some programs put in front of UTF-8


class DataError(ValueError):
    """Data cannot be read, or gives a run no batches; the message names data and reason."""

    def __init__(self, message: str) -> None:
        # What a loader's worker raised, torch hands on as a text that ends like a stack trace.
        super().__init__(message.strip().rpartition(f"{type(self).__name__}: ")[2])


class FieldError(ValueError):
    """An example breaks the shape of its kind in a field, such as ``conversations[2].from``."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"field '{field}' {problem}")
        self.field = field
        self.problem = problem


class DataExampleError(DataError):
    """An example of a data set, a file or hub name, cannot be used.

    ``example`` is the line from 1 for JSON on lines, the index from 0 for lists, parquet and the
    hub; None when the file as a whole cannot be read. ``field`` is None when the whole example is
    broken.
    """

    def __init__(
        self, file: str, example: int | None = None, problem: str = "", field: str | None = None
    ) -> None:
        if not problem:  # torch has only the text of what a loader's worker raised
            return super().__init__(file)
        unit = "line" if example is not None and holds_lines(file) else "example"
        place = file if example is None else f"{file}, {unit} {example}"
        super().__init__(f"{place}: {f'field {field!r} ' if field else ''}{problem}")


def holds_lines(file: str) -> bool:
    """Return whether a file has a row per line: JSON, under any name, but no list."""
    if not file.endswith((".json", ".jsonl", ".jsonl.gz")):
        return False
    try:
        with open_rows(file) as stream:
            return not stream.read(4096).removeprefix(BOM).lstrip().startswith(b"[")
    except (OSError, EOFError, zlib.error):
        return True


def open_rows(file: str) -> BufferedIOBase:
    """Open a file of JSON, packed or not."""
    return gzip.open(file) if file.endswith(".gz") else open(file, "rb")


def kind_of(value: Any) -> str:
    """The kind of ``value``, in the words of JSON, such as ``a list`` or ``null``."""
    return _KINDS.get(type(value), type(value).__name__)


def file_of(files: Sequence[tuple[str, int]], index: int) -> tuple[str, int]:
    """Return the file, of files with numbers of examples, and the place in it of an example."""
    for name, count in files:
        if index < count:
            return name, index
        index -= count
    raise IndexError("there is no such example")
