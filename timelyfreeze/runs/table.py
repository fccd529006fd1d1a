"""Rows of plain values as CSV files, each a dataclass whose fields are the columns.

An empty cell stands for None: what was not measured or does not exist.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from timelyfreeze.plain_json import listed

Row = TypeVar("Row")


def header(kind: type) -> list[str]:
    """Return the columns of a kind of rows."""
    return [field.name for field in fields(kind)]


def write_table(path: Path, kind: type[Row], rows: Iterable[Row]) -> None:
    """Write a file with a header and a line for each row."""
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerow(header(kind))
    append_rows(path, rows)


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Add lines to a file that has its header; they are on disk when this returns."""
    # Opened for each call: what is closed is not lost in a crash.
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        for row in rows:
            writer.writerow([_cell(getattr(row, name)) for name in header(type(row))])


def read_table(path: Path, kind: type[Row]) -> list[Row]:
    """Read what :func:`write_table` and :func:`append_rows` wrote.

    A last line that was cut off while it was written is left out.

    Raises:
        ValueError: If the columns are others, or a cell cannot be read; names file and line.
        OSError: If the file cannot be read.
    """
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: {error}") from error
    lines = text.splitlines()
    if lines and not text.endswith("\n"):
        lines.pop()
    reader = csv.reader(lines)
    try:
        return _rows(path, kind, reader)
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from error


def _rows(path: Path, kind: type[Row], reader: Any) -> list[Row]:
    found: list[str] = next(reader, [])
    columns = header(kind)
    if found != columns:
        raise ValueError(f"{path} has the columns {listed(found)}; not {', '.join(columns)}")
    readers = _cell_readers(kind)
    rows = []
    try:
        for cells in reader:
            pairs = zip(readers, cells, strict=True)
            rows.append(kind(*[_value(read, cell) for read, cell in pairs]))
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
    return rows


def _cell(value: Any) -> str:
    if value is None:
        return ""
    # Shares and times need no more digits than a reader can use; losses keep theirs as strings.
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _cell_readers(kind: type) -> Sequence[Any]:
    hints = get_type_hints(kind)
    return [_plain(hints[name]) for name in header(kind)]


def _plain(hint: Any) -> Any:
    """Return the type of a field, without None."""
    return next((t for t in get_args(hint) if t is not type(None)), hint)


def _value(read: Any, cell: str) -> Any:
    return None if cell == "" and read is not str else read(cell)
