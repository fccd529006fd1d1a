"""Files of rows: json, jsonl, jsonl.gz and parquet, in a folder or alone.

They are read here rather than through ``datasets`` so that an error names the very row.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torchtitan.tools.logging import logger

from torchtitan.data.rows.errors import BOM, DataExampleError, holds_lines, open_rows
from torchtitan.data.rows.values import parse_value

# The number of a row in its file, and the row; of JSON on lines the number is that of the line.
NumberedRow = tuple[int, Any]


def data_files(path: Path, key: str) -> list[Path]:
    """Return a file, or those of a folder in the order of their names.

    Args:
        path: Of either.
        key: Config key that holds it, for errors.

    Raises:
        FileNotFoundError: If there is no such path, or a folder holds no file of rows.
        ValueError: If a file's suffix is not known.
    """
    if path.is_file():
        if path.name.endswith(SUFFIXES):
            return [path]
        raise ValueError(
            f"{key} is {str(path)!r}; a data file must end in one of {', '.join(SUFFIXES)}"
        )
    if not path.is_dir():
        raise FileNotFoundError(f"{key} is {str(path)!r}, which is neither a file nor a folder")
    try:
        entries = sorted(entry for entry in path.iterdir() if entry.is_file())
    except OSError as error:
        raise FileNotFoundError(f"{key} is {str(path)!r}, which cannot be read: {error}") from error
    files = [entry for entry in entries if entry.name.endswith(SUFFIXES)]
    if not files:
        raise FileNotFoundError(
            f"{key} is {str(path)!r}, a folder without a file that ends in {', '.join(SUFFIXES)}; "
            "subfolders are not searched"
        )
    if len(files) < len(entries):
        others = [entry.name for entry in entries if entry not in files]
        logger.info(f"{path}: {len(others)} other file(s) left alone, such as {others[0]}")
    return files


def first_row(files: Sequence[Path]) -> tuple[str, int, Any] | None:
    """Return the file, the number and the value of the first row, all its columns; None if none.

    Raises:
        DataExampleError: If a file cannot be read that far.
        OSError: Likewise.
    """
    rows = ((str(file), *row) for file in files for row in read_rows(file))
    return next(rows, None)


def read_rows(file: Path, columns: Sequence[str] | None = None) -> Iterator[NumberedRow]:
    """Yield the rows of a file.

    Args:
        file: With one of :data:`SUFFIXES`.
        columns: Those that are of use; others may be left out.

    Raises:
        DataExampleError: If a row, or the file, is none.
        OSError: If the file cannot be read.
    """
    reader = next(r for suffix, r in _READERS.items() if file.name.endswith(suffix))
    return reader(file, columns)


def _read_json(file: Path, columns: Sequence[str] | None) -> Iterator[NumberedRow]:
    """Yield the rows of a file with one on each line, or with a list of them."""
    name, number = str(file), 0
    try:
        with open_rows(name) as stream:
            if not holds_lines(name):
                yield from enumerate(_parse(stream.read(), name, None))
                return
            for number, line in enumerate(stream, 1):
                if line.removeprefix(BOM).strip():  # an empty line is no example
                    yield number, _parse(line, name, number)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataExampleError(
            name, number + 1, f"cannot be unpacked ({error}); expected a whole gzip file"
        ) from error


def _read_parquet(file: Path, columns: Sequence[str] | None) -> Iterator[NumberedRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        parquet = pyarrow.parquet.ParquetFile(file)
        there = parquet.schema_arrow.names
        wanted = there if columns is None else [name for name in columns if name in there]
        if twice := [name for name in wanted if columns and there.count(name) > 1]:
            raise ValueError(f"it has the column {twice[0]!r} twice")
        size = 1 if columns is None else 65536  # all columns are read for a look at the first row
        number = 0
        for batch in parquet.iter_batches(size, columns=wanted):
            for example in batch.to_pylist():
                yield number, example
                number += 1
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        # Errors of damaged files may be as long as the file.
        problem = f"is not a readable parquet file ({str(error)[:200]})"
        raise DataExampleError(str(file), None, problem) from error


_READERS: dict[str, Callable[[Path, Sequence[str] | None], Iterator[NumberedRow]]] = {
    ".jsonl.gz": _read_json,
    ".jsonl": _read_json,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
SUFFIXES = tuple(_READERS)


def _parse(data: bytes, file: str, number: int | None) -> Any:
    try:
        return parse_value(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # covers bad UTF-8, bad JSON, deep nesting
        more = "" if number is None else " on one line"
        raise DataExampleError(
            file, number, f"is not valid JSON ({error}); expected JSON in UTF-8{more}"
        ) from error
