"""Rows of plain values as CSV files, each a dataclass whose fields are the columns.

An empty cell stands for None: what was not measured or does not exist. Files may come from
anywhere: a value that no run can have is told by line and column. What a column may have stands in
its type: ``Fraction``, or ``Annotated[str, OneOf("B", "W")]``.
"""

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Generic, TypeVar, get_args, get_type_hints

from timelyfreeze.files.schema import MOST, Within, listed, read_as

Row = TypeVar("Row")

Seconds = Annotated[float, Within(0.0, MOST)]
# Of a clock that misread, or a loss that is not finite, a number may be odd.
AnyFloat = Annotated[float, Within(-MOST, MOST, or_odd=True)]


class Table(Generic[Row]):
    """A CSV file that folders may have, with a row for each ``kind``, a dataclass."""

    def __init__(self, name: str, kind: type[Row]) -> None:
        self.name = name
        self._kind = kind
        self._hints = get_type_hints(kind, include_extras=True)
        self.header = [*self._hints]  # the names of the columns

    def write(self, folder: Path, rows: Iterable[Row] = ()) -> None:
        """Write the file with a header and a line for each row."""
        with (folder / self.name).open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(self.header)
        self.append(folder, rows)

    def append(self, folder: Path, rows: Iterable[Row]) -> None:
        """Add lines to a file that has its header; they are on disk when this returns."""
        # Opened for each call: what is closed is not lost in a crash.
        with (folder / self.name).open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            for row in rows:
                writer.writerow([_cell(getattr(row, name)) for name in self.header])

    def read(self, folder: Path) -> list[Row]:
        """Read what :meth:`write` and :meth:`append` wrote.

        A last line that was cut off while it was written is left out.

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
        reader = csv.reader(lines)
        try:
            found = next(reader, [])
            if found == self.header:
                return [self._row(cells) for cells in reader]
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
        raise ValueError(f"{path} has the columns {listed(found)}; not {', '.join(self.header)}")

    def _row(self, cells: list[str]) -> Row:
        if len(cells) != len(self.header):
            raise ValueError(f"it has {len(cells)} cells for {len(self.header)} columns")
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
    """Return what a cell holds, by the type of its column, whose rules are not looked at."""
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
    """Yield the lines of a table, each as soon as its row is there; as ``markdown_table``."""
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
    """Return a text in which a terminal finds nothing but characters and line breaks."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape", "replace").decode()
        for c in text
    )


def spreadsheet_cell(value: Any) -> Any:
    """Return a cell of a CSV file; no spreadsheet takes its text for a formula."""
    is_formula = isinstance(value, str) and value.startswith(tuple("=+-@\t\r"))
    return f"'{value}" if is_formula else value
