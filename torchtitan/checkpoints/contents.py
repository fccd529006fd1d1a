"""A checkpoint's table of contents, which torch pickles, read without running what it names."""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

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
    """Return the table of a finished checkpoint; raises anything if torch has not written it."""
    with (folder / METADATA).open("rb") as file:
        found = _Unpickler(file).load()
    if not isinstance(found, metadata.Metadata):
        raise pickle.UnpicklingError("it is no table of contents")
    return found
