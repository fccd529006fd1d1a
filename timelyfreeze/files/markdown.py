"""Tables as Markdown, and texts that anyone may have written, made harmless."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, without a line break at its end.

    Args:
        header: Titles of the columns.
        rows: Cells of each line. Line breaks and markup in them are made harmless.
    """
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
