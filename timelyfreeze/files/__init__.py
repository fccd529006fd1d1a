"""Files: untrusted JSON, CSV tables, safe replacement, locks."""

from timelyfreeze.files.lock import FileLock, is_held
from timelyfreeze.files.safe_write import make_new, write_obstacle, write_whole
from timelyfreeze.files.schema import (
    MOST,
    WRITTEN,
    Count,
    Fraction,
    Milliseconds,
    Number,
    OneOf,
    Within,
    broken_rule,
    json_lines,
    listed,
    parse_json,
    read_as,
    read_dataclass,
    read_object,
    shown,
    table_values,
    to_plain,
)
from timelyfreeze.files.table import (
    AnyFloat,
    Seconds,
    Table,
    markdown_lines,
    markdown_table,
    markdown_text,
    printable,
    spreadsheet_cell,
)
