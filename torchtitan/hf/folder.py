"""The tensors of a Hugging Face folder, known from its index and the headers of its files.

No weight is read, so a folder of any size is looked through in a moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from timelyfreeze.files import read_object
from torchtitan.checkpoints.finished import INDEX_FILE


def read_index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor, nothing without an index; ValueError for a broken one."""
    path = folder / INDEX_FILE
    try:
        files: dict[str, str] = read_object(path)["weight_map"]
        if not all(isinstance(name, str) for name in files.values()):
            raise ValueError("weight_map must give the file of each tensor")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(path)!r} is no index of tensors: {error!r}") from error
    return files


def file_numbers(folder: str | None) -> dict[str, int] | None:
    """Return the number of each tensor's file from 1, by which upstream names what it saves.

    Upstream itself looks for digits in the files' names, which may have none, or others. None where
    there is no index: one file then holds all.
    """
    files = {} if folder is None else read_index(Path(folder))
    places = {file: number for number, file in enumerate(sorted(set(files.values())), start=1)}
    return {name: places[file] for name, file in files.items()} or None


SUFFIX = ".safetensors"
# What Mistral puts beside the files: the same weights by names of its own, which nothing reads.
_OTHER_FORM = "consolidated"
# At most as many names of one kind in a message: the first few tell what is wrong.
_N_NAMED = 3


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies and what it looks like; ``dtype`` in the format's words ("BF16")."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a folder's safetensors files, whole and each in one of them alone."""
    paths = folder.glob(f"*{SUFFIX}")
    files = sorted(path for path in paths if not path.name.startswith(_OTHER_FORM))
    absent = sorted(set(read_index(folder).values()) - {file.name for file in files})
    if absent:
        raise ValueError(f"{str(folder)!r} lacks {some_of(absent)}, which its {INDEX_FILE} names")
    if not files:
        raise ValueError(f"{str(folder)!r} has no {SUFFIX} files")
    found: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in _tensors_in(file):
            if name in found:
                raise ValueError(
                    f"{name} is in {found[name].file} and in {file.name} of {str(folder)!r}; "
                    "remove one of the files"
                )
            found[name] = tensor
    return found


def _tensors_in(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yield what the header of a safetensors file names; the file must hold all of it."""
    try:
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no dict)
                tensor = opened.get_slice(name)
                yield name, StoredTensor(file.name, tensor.get_dtype(), tuple(tensor.get_shape()))
    except (OSError, ValueError, SafetensorError) as error:
        # The error may be as long as the file.
        problem = f"is no whole safetensors file: {str(error)[:200]}"
        raise ValueError(f"{str(file)!r} {problem}") from error


def misfits(
    wanted: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    """Say which tensors a folder lacks of a model, or has in another shape."""
    if missing := [name for name in wanted if name not in stored]:
        yield f"it lacks {some_of(missing)}"
    misshapen = [
        f"{name} {list(stored[name])} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in stored and stored[name] != shape
    ]
    if misshapen:
        yield f"it has {some_of(misshapen)}"


def some_of(names: list[str]) -> str:
    """Return the first few names in words, and how many more there are."""
    rest = len(names) - _N_NAMED
    return ", ".join(names[:_N_NAMED]) + (f" and {rest} more" if rest > 0 else "")
