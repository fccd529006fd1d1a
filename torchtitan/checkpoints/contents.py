"""A checkpoint's table of contents, pickled by torch, read without running code in it."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException

METADATA = ".metadata"
# What torch puts into a table, besides types of tensors.
_KNOWN = {
    (metadata.__name__, name): value
    for name, value in vars(metadata).items()
    if isinstance(value, type) and value.__module__ == metadata.__name__
} | {
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch", "Size"): torch.Size,
    **{(module, "PosixPath"): Path for module in ("pathlib", "pathlib._local")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is None and module == "torch":
            known = getattr(torch, name, None)
            known = known if isinstance(known, torch.dtype) else None
        if known is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return known


def read_contents(folder: Path) -> metadata.Metadata:
    """Return the table of a finished checkpoint; raises anything for a file not of torch."""
    with (folder / METADATA).open("rb") as file:
        found = _Unpickler(file).load()
    if not isinstance(found, metadata.Metadata) or not _has_types_of_torch(found):
        raise pickle.UnpicklingError("it is no table of contents")
    return found


def _has_types_of_torch(table: metadata.Metadata) -> bool:
    """Return whether all values have the types expected by readers."""
    entries = (table.state_dict_metadata or {}).values()
    tensors = [each for each in entries if isinstance(each, metadata.TensorStorageMetadata)]
    places = (table.storage_data or {}).values()
    return all(
        isinstance(each.size, torch.Size) and isinstance(each.properties.dtype, torch.dtype)
        for each in tensors
    ) and all(
        (type(each.offset), type(each.length), type(each.relative_path)) == (int, int, str)
        for each in places
    )


@contextmanager
def readable(checkpoint: Path) -> Iterator[None]:
    """Read a checkpoint inside; torch's errors become a ValueError."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        raise ValueError(
            f"the checkpoint {str(checkpoint)!r} is damaged: {cause_of(error)}"
        ) from error


def cause_of(error: BaseException) -> str:
    """Return the first rank's reason in a line, without its stack or torch's advice to run code."""
    rank = ""
    if isinstance(error, CheckpointException):
        number, (error, _) = min(error.failures.items(), key=lambda item: item[0])
        rank = f" (rank {number})"
    text = " ".join(str(error).split()) or type(error).__name__
    if "weights_only" in text:
        text = "it has objects of Python in it, which are not run"
    return f"{text}{rank}"
