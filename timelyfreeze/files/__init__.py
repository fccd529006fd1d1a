"""Files: JSON that anyone may have written, CSV tables, safe replacement, locks."""

from timelyfreeze.files.lock import FileLock, is_held
from timelyfreeze.files.plain_json import (
    field_of,
    keys_of,
    list_of,
    listed,
    number_of,
    parse_json,
    read_dataclass,
    read_object,
    shown,
    truth_of,
    whole_of,
)
from timelyfreeze.files.safe_write import write_obstacle, write_whole
from timelyfreeze.files.table import (
    AnyFloat,
    Count,
    Fraction,
    Number,
    OneOf,
    Seconds,
    Table,
    markdown_lines,
    markdown_table,
    markdown_text,
    printable,
    spreadsheet_cell,
)

__all__ = [
    "AnyFloat", "Count", "FileLock", "Fraction", "Number", "OneOf", "Seconds", "Table", "field_of",
    "is_held", "keys_of", "list_of", "listed", "markdown_lines", "markdown_table",
    "markdown_text", "number_of", "parse_json", "printable", "read_dataclass", "read_object",
    "shown", "spreadsheet_cell", "truth_of", "whole_of", "write_obstacle", "write_whole",
]  # fmt: skip
