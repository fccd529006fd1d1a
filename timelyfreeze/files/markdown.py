"""Tables as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table, without a line break at its end.

    Args:
        header: Titles of the columns.
        rows: Cells of each line. Line breaks and pipes in them are made harmless.
    """
    return "\n".join(markdown_lines(header, rows))


def markdown_lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table, each as soon as its row is there; as ``markdown_table``."""
    yield _line(header)
    yield _line(["---"] * len(header))
    yield from map(_line, rows)


def _line(cells: Sequence[str]) -> str:
    texts = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return "|" + "|".join(f" {text} " if text else " " for text in texts) + "|"
