"""Rows of plain values as CSV files: a dataclass with a field per column.

An empty cell stands for None: not measured, or not existing. Files may come from anywhere: errors
name line and column. A column's type holds its rule: ``Fraction``, or ``Annotated[str, OneOf("B",
"W")]``.
"""

import csv
import io
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Generic, TypeVar, get_args, get_type_hints

from timelyfreeze.files.safe_write import append_whole
from timelyfreeze.files.schema import MOST, Within, listed, read_as

logger = logging.getLogger(__name__)

Row = TypeVar("Row")

Seconds = Annotated[float, Within(0.0, MOST)]
# Of a clock that misread, or a loss that is not finite, a number may be odd.
AnyFloat = Annotated[float, Within(-MOST, MOST, or_odd=True)]


class Table(Generic[Row]):
    """A CSV file of a folder, with rows of the dataclass ``kind``."""

    def __init__(self, name: str, kind: type[Row]) -> None:
        self.name = name
        self._kind = kind
        self._hints = get_type_hints(kind, include_extras=True)
        self.header = [*self._hints]  # the names of the columns

    def write(self, folder: Path, rows: Iterable[Row] = ()) -> None:
        """Write the file: a header and all rows."""
        (folder / self.name).unlink(missing_ok=True)
        self.append(folder, rows)

    def append(self, folder: Path, rows: Iterable[Row]) -> None:
        """Append lines to a file, with its header if new; on disk when this returns."""
        self.append_cells(folder, ([_cell(getattr(row, n)) for n in self.header] for row in rows))

    def append_cells(self, folder: Path, lines: Iterable[Sequence[str]]) -> None:
        """Append lines as :meth:`append`, all or none, from texts of cells."""
        path, text = folder / self.name, io.StringIO()
        is_begun = path.exists() and path.stat().st_size > 0
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([*([] if is_begun else [self.header]), *lines])
        append_whole(path, text.getvalue())

    def read(self, folder: Path) -> list[Row]:
        """Read a file of :meth:`write` and :meth:`append`.

        A last line cut off during writing is left out. A line in the middle with too few or too
        many cells, cut or glued to another, is left out with a warning.

        Raises:
            ValueError: If the columns are others, or a cell cannot be read; names file and line.
            OSError: If the file cannot be read.
        """
        path = folder / self.name
        try:
            text = path.read_text()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no text: {error}") from error
        lines = text.splitlines()
        if lines and not text.endswith("\n"):
            lines.pop()
        # Line by line: a quotation mark that lost its other one hides no lines.
        found: list[list[str]] = []
        try:
            found.extend(next(csv.reader([line]), []) for line in lines)
        except csv.Error as error:
            raise ValueError(f"{path}, line {len(found) + 1}: {error}") from error
        if found[:1] == [self.header]:
            return list(self._rows(path, found))
        columns = listed(found[0] if found else [])
        raise ValueError(f"{path} has the columns {columns}; not {', '.join(self.header)}")

    def _rows(self, path: Path, lines: list[list[str]]) -> Iterator[Row]:
        for number, cells in enumerate(lines[1:], start=2):
            if len(cells) != len(self.header):
                problem = f"it has {len(cells)} cells for {len(self.header)} columns"
                logger.warning("%s, line %d is left out: %s", path, number, problem)
                continue
            try:
                yield self._row(cells)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error

    def _row(self, cells: list[str]) -> Row:
        pairs = zip(self._hints.items(), cells, strict=True)
        return self._kind(
            *[read_as(hint, _value(hint, cell), name) for (name, hint), cell in pairs]
        )


def _cell(value: Any) -> str:
    if value is None:
        return ""
    # Fractions and times need no more digits than a reader can use.
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _value(hint: Any, cell: str) -> Any:
    """Return a cell's value by its column's type, without its rules."""
    if cell == "" and NoneType in get_args(hint):
        return None
    for number in () if _is_text(hint) else (int, float):
        with suppress(ValueError):
            return number(cell)
    return cell


def _is_text(hint: Any) -> bool:
    return hint is str or any(map(_is_text, get_args(hint)))


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, without a line break at its end; markup in its cells is made harmless."""
    return "\n".join(markdown_lines(header, rows))


def markdown_lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of ``markdown_table``, row by row as they come."""
    yield _line(header)
    yield _line(["---"] * len(header))
    yield from map(_line, rows)


def _line(cells: Sequence[str]) -> str:
    texts = (markdown_text(" ".join(cell.split())) for cell in cells)
    return "|" + "|".join(f" {text} " if text else " " for text in texts) + "|"


def markdown_text(text: str) -> str:
    """Return a text without markup, HTML and links of its own, nor codes for terminals."""
    return re.sub(r"[\\`*|]|<(?=[A-Za-z/!?])|(?<=\])\(", r"\\\g<0>", printable(text))


def printable(text: str) -> str:
    """Return a text of printable characters and line breaks alone."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape", "replace").decode()
        for c in text
    )


def spreadsheet_cell(value: Any) -> Any:
    """Return a cell of a CSV file; no spreadsheet takes its text for a formula."""
    is_formula = isinstance(value, str) and value.startswith(tuple("=+-@\t\r"))
    return f"'{value}" if is_formula else value
