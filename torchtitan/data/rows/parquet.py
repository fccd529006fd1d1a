"""Rows of parquet files, in batches of bounded memory."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchtitan.data.rows.errors import DataError, DataExampleError
from torchtitan.data.rows.messages import without_nulls

# The number of a row in its file, and the row; of JSON on lines the number is that of the line.
NumberedRow = tuple[int, Any]
# A small file may unpack to a row, or a batch of rows, that fills the memory.
MOST_BYTES, BATCH_BYTES = 2**26, 2**30
_FEWEST, _MOST = 16, 65536  # rows of a batch


def read_parquet(file: Path, columns: Sequence[str] | None) -> Iterator[NumberedRow]:
    """Yield the rows of a file with some columns; a DataExampleError names a damaged file."""
    import pyarrow
    import pyarrow.parquet

    try:
        parquet = pyarrow.parquet.ParquetFile(file)
        there = parquet.schema_arrow.names
        wanted = there if columns is None else [name for name in columns if name in there]
        if twice := [name for name in wanted if columns and there.count(name) > 1]:
            raise ValueError(f"it has the column {twice[0]!r} twice")
        # All columns are read for a look at the first row.
        most = 1 if columns is None else _MOST
        for number, example in enumerate(_bounded_rows(parquet, wanted, most)):
            yield number, {name: without_nulls(value) for name, value in example.items()}
    except DataError as error:
        raise DataExampleError(str(file), None, str(error)) from error
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        # Errors of damaged files may be as long as the file.
        problem = f"is not a readable parquet file ({str(error)[:200]})"
        raise DataExampleError(str(file), None, problem) from error


def _bounded_rows(parquet: Any, columns: list[str], most: int) -> Iterator[dict[str, Any]]:
    """Yield rows from batches of ``most`` rows, or of fewer to fit into ``BATCH_BYTES``.

    A file stores a value once however often a dictionary repeats it, so any row may unpack to all
    bytes of its row group. A DataError refuses a row above ``MOST_BYTES``; unread where the mean of
    a row group is above.
    """
    too_long = DataError(f"has a row of more than {MOST_BYTES >> 20} MiB; a row is an example")
    roots = tuple(f"{name}." for name in columns)
    for index in range(parquet.num_row_groups):
        group = parquet.metadata.row_group(index)
        chunks = [group.column(i) for i in range(group.num_columns)]
        wanted = [chunk for chunk in chunks if f"{chunk.path_in_schema}.".startswith(roots)]
        n_bytes = sum(chunk.total_uncompressed_size for chunk in wanted)
        if n_bytes > MOST_BYTES * group.num_rows:
            raise too_long
        size = min(most, max(_FEWEST, BATCH_BYTES // max(1, n_bytes)))
        for batch in parquet.iter_batches(size, row_groups=[index], columns=columns):
            if batch.nbytes > MOST_BYTES and any(
                batch.slice(row, 1).nbytes > MOST_BYTES for row in range(batch.num_rows)
            ):
                raise too_long
            yield from batch.to_pylist()
