"""Examples of instruction data: from a local file, a folder of files, or the hub.

The examples are encoded by ``torchtitan.data.dataset`` while training.
"""

import gzip
import os
import re
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torchtitan.tools.logging import logger

from timelyfreeze.files import listed
from torchtitan.data.rows.errors import (
    BOM,
    DataError,
    DataExampleError,
    FieldError,
    file_of,
    holds_lines,
    kind_of,
    open_rows,
)
from torchtitan.data.rows.kinds import ROW_KINDS, RowShape, row_shape
from torchtitan.data.rows.messages import Conversation, chat_messages, parse_value, without_nulls
from torchtitan.data.rows.parquet import MOST_BYTES, NumberedRow, read_parquet

T = TypeVar("T")
Columns = tuple[tuple[str, str], ...]


class HubPart(NamedTuple):
    """Part of a hub data set; "": the only subset, "train", the newest revision."""

    subset: str = ""
    split: str = ""
    revision: str = ""


WHOLE = HubPart()


@dataclass(frozen=True)
class InstructExamples:
    """The examples of a source, with their places.

    Rows are a list, or a hub data set, which stays on disk and has no ``numbers`` of examples in
    files. ``files`` has ``(name, examples)`` in order. ``columns`` names the column of a field, for
    errors; ``about`` describes the rows for people.
    """

    examples: Sequence[dict[str, Any]]
    files: tuple[tuple[str, int], ...]
    messages: Callable[[dict[str, Any]], Conversation]
    numbers: Sequence[int] | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    about: str = ""

    def __len__(self) -> int:
        """Count the examples."""
        return len(self.examples)

    @property
    def is_remote(self) -> bool:
        """Whether the examples are a hub data set, still unread."""
        return self.numbers is None

    def read(self, index: int, use: Callable[[Conversation], T]) -> T:
        """Return the result of ``use`` on an example; a DataExampleError names its place."""
        try:
            example = self.examples[index]
            if self.is_remote:
                example = {name: without_nulls(value) for name, value in example.items()}
            return use(self.messages(example))
        except FieldError as error:
            head = error.field.split("[")[0]
            named = self.columns.get(head, head) + error.field.removeprefix(head)
            raise DataExampleError(*self.place(index), error.problem, named) from error
        except ValueError as error:
            raise DataExampleError(*self.place(index), str(error)) from error

    def place(self, index: int) -> tuple[str, int]:
        """File and example number of the example at ``index``."""
        name, _ = file_of(self.files, index)
        return name, index if self.numbers is None else self.numbers[index]


def is_local_path(path: str, *, key: str = "training.dataset_path") -> bool:
    """Tell a path on this disk from a hub name; FileNotFoundError for a missing path."""
    if os.path.exists(path):
        return True
    if path.startswith((".", "/", "~")) or path.endswith(SUFFIXES):
        raise FileNotFoundError(
            f"{key} is {path!r}; there is no such file or folder (looked from {os.getcwd()!r})"
        )
    return False


def read_examples(
    path: str,
    kind: str,
    *,
    columns: Columns = (),
    part: HubPart = WHOLE,
    key: str = "training.dataset_path",
) -> InstructExamples:
    """Read a source, at least an example; only the columns of its kind are kept.

    ``path`` is a json, jsonl, jsonl.gz or parquet file, a folder of those (read in the order of
    their names), or a hub name. ``kind`` is the kind of rows, or "auto": by the first row.
    ``columns`` are fields with columns called otherwise. Errors name ``key``.
    """
    if is_local_path(path, key=key):
        return _read_local(Path(path), kind, columns, key)
    logger.info(f"{key} {path!r} is no file or folder here; loading it as a hub data set")
    return _read_hub(path, kind, columns, part, key)


def _read_local(path: Path, kind: str, columns: Columns, key: str) -> InstructExamples:
    files = data_files(path, key)
    try:
        states = tuple((state.st_size, state.st_mtime_ns) for state in map(os.stat, files))
    except OSError as error:
        raise DataExampleError(str(error.filename), None, f"cannot be read ({error})") from error
    examples = _read_files(tuple(files), states, kind, columns)
    if not len(examples):
        raise DataError(f"{key} is {str(path)!r}, which holds no examples; at least one is needed")
    logger.info(f"Read {len(examples)} examples from {len(files)} file(s) of {path}")
    return examples


# Examples are looked at before processes start, and again by the loaders of training and
# validation.
@lru_cache(maxsize=8)
def _read_files(
    files: tuple[Path, ...], states: tuple[tuple[int, int], ...], kind: str, columns: Columns
) -> InstructExamples:
    """Return the examples of files; ``states`` tell whether files have changed."""
    examples: list[dict[str, Any]] = []
    numbers = array("Q")
    counts: list[tuple[str, int]] = []
    file = files[0]
    try:
        # All columns of the first row are looked at.
        rows = ((str(file), *row) for file in files for row in read_rows(file))
        first = next(rows, None)
        if first is None:
            return InstructExamples([], (), chat_messages, numbers)
        shape, there = _shape(*first, kind, columns), dict.fromkeys(first[2])
        for file in files:
            before = len(examples)
            for number, row in read_rows(file, list(shape.columns.values())):
                examples.append(_kept(row, shape, str(file), number))
                there |= dict.fromkeys(row)
                numbers.append(number)
            counts.append((str(file), len(examples) - before))
    except OSError as error:
        place = str(error.filename or file)
        raise DataExampleError(place, None, f"cannot be read ({error})") from error
    about = f"{first[0]}: {shape.told(list(there))}"
    logger.info(about)
    messages = ROW_KINDS[shape.kind].messages
    return InstructExamples(examples, tuple(counts), messages, numbers, shape.columns, about)


def _read_hub(name: str, kind: str, columns: Columns, part: HubPart, key: str) -> InstructExamples:
    # Imported here: local data sets need nothing of this large package.
    from datasets import load_dataset

    chosen = {"name": part.subset, "revision": part.revision}
    chosen = {key: value for key, value in chosen.items() if value}
    try:
        rows = load_dataset(name, split=part.split or "train", **chosen)
    except (ValueError, OSError) as error:
        raise DataError(
            f"{key} is {name!r}, of which the hub gives no rows with data.subset {part.subset!r}, "
            f"data.split {part.split!r}, data.revision {part.revision!r}: {error}"
        ) from error
    if len(rows) == 0:
        raise DataError(f"{key} is {name!r}, which holds no examples; at least one is needed")
    shape = _shape(name, 0, dict.fromkeys(rows.column_names), kind, columns)
    about = f"{name}: {shape.told(rows.column_names)}"
    logger.info(about)
    fields = {column: field for field, column in shape.columns.items()}
    rows = rows.select_columns([column for column in fields if column in rows.column_names])
    others = {c: fields[c] for c in rows.column_names if c != fields[c]}
    rows = rows.rename_columns(others)
    messages = ROW_KINDS[shape.kind].messages
    return InstructExamples(rows, ((name, len(rows)),), messages, None, shape.columns, about)


def _shape(file: str, number: int, row: Any, kind: str, columns: Columns) -> RowShape:
    """Return the kind of rows by the first."""
    if not isinstance(row, dict):
        raise DataExampleError(file, number, f"is {kind_of(row)}; expected an object")
    try:
        shape = row_shape(kind, list(row), dict(columns))
    except ValueError as error:
        raise DataExampleError(file, number, str(error)) from error
    _kept(row, shape, file, number)
    return shape


def _kept(row: Any, shape: RowShape, file: str, number: int) -> dict[str, Any]:
    required = list(shape.required.values())
    if not isinstance(row, dict):
        problem = f"is {kind_of(row)}; expected an object with {required}"
        raise DataExampleError(file, number, problem)
    for column in required:
        if column not in row:
            problem = (
                f"is missing; expected {required}, the example has {list(row)}; "
                'training.dataset = "auto" finds the kind of rows'
            )
            raise DataExampleError(file, number, problem, column)
    return {name: row[column] for name, column in shape.columns.items() if column in row}


def data_files(path: Path, key: str) -> list[Path]:
    """Return a file, or a folder's files in the order of names; errors name ``key``."""
    if path.is_file():
        if path.name.endswith(SUFFIXES):
            return [path]
        raise ValueError(
            f"{key} is {str(path)!r}; a data file must end in one of {', '.join(SUFFIXES)}"
        )
    if not path.is_dir():
        raise FileNotFoundError(f"{key} is {str(path)!r}, which is neither a file nor a folder")
    try:
        entries = sorted(e for e in path.iterdir() if not e.name.startswith("."))
    except OSError as error:
        raise FileNotFoundError(f"{key} is {str(path)!r}, which cannot be read: {error}") from error
    files = [entry for entry in entries if entry.name.endswith(SUFFIXES) and entry.is_file()]
    if not files:
        raise FileNotFoundError(
            f"{key} is {str(path)!r}, a folder without a file that ends in {', '.join(SUFFIXES)}; "
            "subfolders are not searched"
        )
    files = to_train_on(files)
    if others := [entry.name for entry in entries if entry not in files]:
        logger.info(f"{path}: left alone {listed(others)}")
    return files


# By which a name says of which part of a data set it is, as ``datasets`` has it.
_TRAIN = frozenset(("train", "training"))
_TEST = ("validation", "valid", "dev", "val", "test", "testing", "eval", "evaluation")
PARTS = _TRAIN.union(_TEST)


def to_train_on(files: list[Path]) -> list[Path]:
    """Return the files named as the training part; all without such names."""
    named = [f for f in files if not _TRAIN.isdisjoint(re.split(r"[-._ 0-9]", f.name))]
    return named or files


def read_rows(file: Path, columns: Sequence[str] | None = None) -> Iterator[NumberedRow]:
    """Yield the rows of a file; columns other than the named ones may be left out."""
    reader = next(r for suffix, r in _READERS.items() if file.name.endswith(suffix))
    return reader(file, columns)


def _read_json(file: Path, columns: Sequence[str] | None) -> Iterator[NumberedRow]:
    """Yield the rows of a file with a row per line, or with a list of rows."""
    name, number = str(file), 0
    try:
        with open_rows(name) as stream:
            if not holds_lines(name):
                yield from enumerate(_parse(stream.read(), name, None))
                return
            lines = iter(partial(stream.readline, MOST_BYTES + 1), b"")
            for number, line in enumerate(lines, 1):
                if len(line) > MOST_BYTES:
                    raise DataExampleError(
                        name, number, f"has more than {MOST_BYTES >> 20} MiB; a row is an example"
                    )
                if line.removeprefix(BOM).strip():  # an empty line is no example
                    yield number, _parse(line, name, number)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataExampleError(
            name, number + 1, f"cannot be unpacked ({error}); expected a whole gzip file"
        ) from error


_READERS: dict[str, Callable[[Path, Sequence[str] | None], Iterator[NumberedRow]]] = {
    ".jsonl.gz": _read_json,
    ".jsonl": _read_json,
    ".json": _read_json,
    ".parquet": read_parquet,
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
