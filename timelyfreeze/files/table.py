"""Rows of plain values as CSV files, each a dataclass whose fields are the columns.

An empty cell stands for None: what was not measured or does not exist. Files may come from
anywhere: a value that no run can have is told by line and column.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from timelyfreeze.files.plain_json import listed, shown

Row = TypeVar("Row")
# By column: the smallest and the largest number, or the words that there are.
Rules = Mapping[str, tuple[float, float] | Collection[str]]

# No step, byte or millisecond of a run has a larger number, and plots can be drawn up to here.
MOST = 1e15


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


def read_table(path: Path, kind: type[Row], rules: Rules | None = None) -> list[Row]:
    """Read what :func:`write_table` and :func:`append_rows` wrote.

    A last line that was cut off while it was written is left out.

    Args:
        path: The file.
        kind: Dataclass of a row.
        rules: What a column may have. Numbers without a rule are at most ``MOST`` in size, or NaN
            or infinite, if they need not be whole.

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
        return _rows(path, kind, rules or {}, reader)
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from error


def check_row(row: Any, rules: Rules) -> None:
    """Raise if a row, of a dataclass, has a value that its column cannot have (:func:`read_table`).

    Raises:
        ValueError: Naming the column, the value and the rule.
    """
    for name in header(type(row)):
        value: Any = getattr(row, name)
        rule: Any = rules.get(name)
        if value is None:
            continue
        if isinstance(value, str):
            if rule is not None and value not in rule:
                known = ", ".join(map(repr, sorted(map(str, rule))))
                raise ValueError(f"{name} is {shown(value)}; known: {known}")
            continue
        low, high = rule or (-MOST, MOST)
        is_odd = isinstance(value, float) and not math.isfinite(value)
        if not (low <= value <= high or (is_odd and (rule is None or high == math.inf))):
            raise ValueError(f"{name} is {shown(value)}; it must lie in [{low:g}, {high:g}]")


def _rows(path: Path, kind: type[Row], rules: Rules, reader: Any) -> list[Row]:
    found: list[str] = next(reader, [])
    columns = _columns(kind)
    if found != [column.name for column in columns]:
        raise ValueError(f"{path} has the columns {listed(found)}; not {', '.join(header(kind))}")
    rows = []
    for cells in reader:
        try:
            if len(cells) != len(columns):
                raise ValueError(f"it has {len(cells)} cells for {len(columns)} columns")
            pairs = zip(columns, cells, strict=True)
            row = kind(*[column.value(cell) for column, cell in pairs])
            check_row(row, rules)
        except ValueError as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
        rows.append(row)
    return rows


def _cell(value: Any) -> str:
    if value is None:
        return ""
    # Shares and times need no more digits than a reader can use; losses keep theirs as strings.
    return f"{value:.7g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class _Column:
    """How the cells of a column are read."""

    name: str
    kind: Any
    may_be_empty: bool

    def value(self, cell: str) -> Any:
        if self.kind is str:
            return cell
        if cell == "" and self.may_be_empty:
            return None
        try:
            return self.kind(cell)
        except ValueError:
            word = "a whole number" if self.kind is int else "a number"
            raise ValueError(f"{self.name} is {shown(cell)}; it must be {word}") from None


def _columns(kind: type) -> list[_Column]:
    hints = get_type_hints(kind)
    columns = []
    for name in header(kind):
        kinds = get_args(hints[name]) or (hints[name],)
        plain = next(one for one in kinds if one is not type(None))
        columns.append(_Column(name, plain, type(None) in kinds))
    return columns
