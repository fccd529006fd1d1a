"""Examples of instruction data: from a local file, a folder of files, or the hub.

Local files are read here rather than through ``datasets`` so that an error names the very example.
The examples are not encoded: ``torchtitan.data.dataset`` does that while training.
"""

import gzip
import json
import os
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from torchtitan.tools.logging import logger

T = TypeVar("T")
_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a truth value",
    int: "a number",
    float: "a number",
    type(None): "null",
}


class FieldError(ValueError):
    """An example breaks the shape of its data set; formatters, which raise it, know no place.

    Args:
        field: Name of the field, such as ``output`` or ``conversations[2].from``.
        problem: What was found and what was expected.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"field '{field}' {problem}")
        self.field = field
        self.problem = problem


class DataExampleError(ValueError):
    """An example of a data set cannot be used.

    Args:
        file: File or hub name.
        example: Line number from 1 for jsonl, index from 0 for json, parquet and the hub; None when
            the file as a whole cannot be read.
        problem: What was found and what was expected.
        field: Name of the field, or None when the example as a whole is broken.
    """

    def __init__(
        self, file: str, example: int | None, problem: str, field: str | None = None
    ) -> None:
        unit = "line" if file.endswith((".jsonl", ".jsonl.gz")) else "example"
        place = file if example is None else f"{file}, {unit} {example}"
        super().__init__(f"{place}: {f'field {field!r} ' if field else ''}{problem}")
        self.file = file
        self.example = example
        self.field = field
        self.problem = problem


@dataclass(frozen=True)
class InstructExamples:
    """The examples of a data set, each with its place.

    Args:
        examples: A list of dictionaries, or a hub data set, which stays on disk.
        files: ``(name, examples)`` for each source in order; the counts add up to
            ``len(examples)``.
        numbers: Example number of every example in its source; None where that is the index (the
            hub).
    """

    examples: Sequence[dict[str, Any]]
    files: tuple[tuple[str, int], ...]
    numbers: array | None = None

    def __len__(self) -> int:
        """Count the examples."""
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the example at ``index``."""
        return self.examples[index]

    @property
    def is_remote(self) -> bool:
        """Whether the examples are a hub data set, of which none has been looked at."""
        return self.numbers is None

    def read(self, index: int, reader: Callable[[dict[str, Any]], T]) -> T:
        """Return what ``reader`` makes of the example at ``index``.

        Raises:
            DataExampleError: With the example's place, where ``reader`` raises a ValueError.
        """
        try:
            return reader(self.examples[index])
        except FieldError as error:
            raise DataExampleError(*self.place(index), error.problem, error.field) from error
        except ValueError as error:
            raise DataExampleError(*self.place(index), str(error)) from error

    def place(self, index: int) -> tuple[str, int]:
        """File and example number of the example at ``index``."""
        number = index if self.numbers is None else self.numbers[index]
        for name, count in self.files:
            if index < count:
                return name, number
            index -= count
        raise IndexError(f"there is no such example; the data set has {len(self)} examples")


def is_local_path(path: str, *, key: str = "training.dataset_path") -> bool:
    """Tell a local path from a hub name.

    Args:
        path: Value of ``dataset_path``.
        key: Config key that holds it, for the error.

    Returns:
        bool: True if ``path`` exists on disk, False if it can only be a hub name.

    Raises:
        FileNotFoundError: If it looks like a path (starts with ``.``, ``/`` or ``~``, or ends with
            the suffix of a data file) and does not exist.
    """
    if os.path.exists(os.path.expanduser(path)):
        return True
    if path.startswith((".", "/", "~")) or path.endswith(SUFFIXES):
        raise FileNotFoundError(
            f"{key} is {path!r}; there is no such file or folder (looked from {os.getcwd()!r})"
        )
    return False


def read_examples(
    path: str, fields: Sequence[str], *, key: str = "training.dataset_path"
) -> InstructExamples:
    """Read a data set; of every example only ``fields`` are kept.

    Args:
        path: A json, jsonl, jsonl.gz or parquet file, a folder of those (read in the order of their
            names), or a hub name, of which the split ``train`` is loaded.
        fields: Fields that every example must have.
        key: Config key that holds ``path``, for errors.

    Returns:
        InstructExamples: At least one example.

    Raises:
        FileNotFoundError: If a local path does not exist, or a folder holds no data file.
        ValueError: If a file's suffix is not known, or there are no examples.
        DataExampleError: If an example is not valid JSON, not an object, or lacks a field.
    """
    if is_local_path(path, key=key):
        return _read_local(Path(path).expanduser(), fields, key)
    logger.info(f"{key} {path!r} is no file or folder here; loading it as a hub data set")
    return _read_hub(path, fields, key)


def _read_local(path: Path, fields: Sequence[str], key: str) -> InstructExamples:
    files = _data_files(path, key)
    try:
        states = tuple((state.st_size, state.st_mtime_ns) for state in map(os.stat, files))
    except OSError as error:
        raise DataExampleError(str(error.filename), None, f"cannot be read ({error})") from error
    examples = _read_files(tuple(files), states, tuple(fields))
    if not len(examples):
        raise ValueError(f"{key} is {str(path)!r}, which holds no examples; at least one is needed")
    logger.info(f"Read {len(examples)} examples from {len(files)} file(s) of {path}")
    return examples


# Examples are looked at before processes start, and again by the loaders of training and
# validation.
@lru_cache(maxsize=2)
def _read_files(
    files: tuple[Path, ...], states: tuple[tuple[int, int], ...], fields: tuple[str, ...]
) -> InstructExamples:
    """Return the examples of files; ``states`` tell whether they are those read before."""
    examples: list[dict[str, Any]] = []
    numbers = array("Q")
    counts: list[tuple[str, int]] = []
    for file in files:
        before = len(examples)
        try:
            reader = next(r for suffix, r in _READERS.items() if file.name.endswith(suffix))
            for number, example in reader(file, fields):
                _require_fields(example, fields, str(file), number)
                examples.append({field: example[field] for field in fields})
                numbers.append(number)
        except OSError as error:
            raise DataExampleError(str(file), None, f"cannot be read ({error})") from error
        counts.append((str(file), len(examples) - before))
    return InstructExamples(examples, tuple(counts), numbers)


def _read_hub(name: str, fields: Sequence[str], key: str) -> InstructExamples:
    # Imported here: local data sets need nothing of this large package.
    from datasets import load_dataset

    examples = load_dataset(name, split="train")
    if len(examples) == 0:
        raise ValueError(f"{key} is {name!r}, which holds no examples; at least one is needed")
    _require_fields(dict.fromkeys(examples.column_names), fields, name, 0)
    examples = examples.select_columns(list(fields))
    return InstructExamples(examples, ((name, len(examples)),))


def _data_files(path: Path, key: str) -> list[Path]:
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


def _read_jsonl(file: Path, fields: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    with gzip.open(file) if file.name.endswith(".gz") else file.open("rb") as stream:
        try:
            for number, line in enumerate(stream, 1):
                if line.strip():  # an empty line is no example
                    yield number, _parse(line, str(file), number)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataExampleError(
                str(file), number + 1, f"cannot be unpacked ({error}); expected a whole gzip file"
            ) from error


def _read_json(file: Path, fields: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    examples = _parse(file.read_bytes(), str(file), None)
    if not isinstance(examples, list):
        problem = (
            f"holds {kind_of(examples)}; expected a list of objects (for one a line, use .jsonl)"
        )
        raise DataExampleError(str(file), None, problem)
    yield from enumerate(examples)


def _read_parquet(file: Path, fields: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        parquet = pyarrow.parquet.ParquetFile(file)
        _require_fields(dict.fromkeys(parquet.schema_arrow.names), fields, str(file), 0)
        number = 0
        for batch in parquet.iter_batches(columns=list(fields)):
            for example in batch.to_pylist():
                yield number, example
                number += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        # Errors of damaged files may be as long as the file.
        problem = f"is not a readable parquet file ({str(error)[:200]})"
        raise DataExampleError(str(file), None, problem) from error


_READERS: dict[str, Callable[[Path, Sequence[str]], Iterator[tuple[int, dict[str, Any]]]]] = {
    ".jsonl.gz": _read_jsonl,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
SUFFIXES = tuple(_READERS)


def _parse(data: bytes, file: str, number: int | None) -> Any:
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # covers bad UTF-8, bad JSON, deep nesting
        more = "" if number is None else " on one line"
        raise DataExampleError(
            file, number, f"is not valid JSON ({error}); expected JSON in UTF-8{more}"
        ) from error


def _require_fields(example: Any, fields: Sequence[str], file: str, number: int) -> None:
    if not isinstance(example, dict):
        problem = f"is {kind_of(example)}; expected an object with {list(fields)}"
        raise DataExampleError(file, number, problem)
    for field in fields:
        if field not in example:
            problem = f"is missing; expected {list(fields)}, the example has {list(example)}"
            raise DataExampleError(file, number, problem, field)


def kind_of(value: Any) -> str:
    """What ``value`` is, in the words of JSON, such as ``a list`` or ``null``."""
    return _KINDS.get(type(value), type(value).__name__)
