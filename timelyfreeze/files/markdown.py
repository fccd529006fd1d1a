"""Tables as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> str:
    """Return a table, without a line break at its end.

    Args:
        header: Titles of the columns.
        rows: Cells of each line. Line breaks and pipes in them are made harmless.
        align: A letter for each column, "l" or "r"; empty to leave it to the reader's program.
    """
    rules = [{"l": ":--", "r": "--:"}[letter] for letter in align] or ["---"] * len(header)
    cells = ([" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows)
    return "\n".join(map(_line, (header, rules, *cells)))


def _line(cells: Sequence[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"
