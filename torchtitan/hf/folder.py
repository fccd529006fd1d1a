"""The tensors of a Hugging Face folder, known from the headers of its safetensors files.

No weight is read, so a folder of any size is looked through in a moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from torchtitan.checkpoints.finished import INDEX_FILE
from torchtitan.hf.adapter import tensor_shapes
from torchtitan.hf.index import read_index
from torchtitan.hf.llama_config import HEAD, LlamaConfig

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
    """Return every tensor of the safetensors files of ``folder``, by name.

    Raises:
        ValueError: If there are none, one that the index names is missing or damaged, or two hold
            the same tensor.
    """
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


def tensor_errors(config: LlamaConfig, tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Say what keeps ``tensors`` from being the weights of ``config``."""
    expected = tensor_shapes(config)
    # Old folders keep the rotary frequencies, which follow from the configuration.
    ignored = {name for name in tensors if name.endswith("rotary_emb.inv_freq")} | {HEAD}
    missing = [name for name in expected if name not in tensors]
    unknown = sorted(tensors.keys() - expected.keys() - ignored)
    misshapen = [
        f"{name} {list(tensors[name].shape)} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if missing:
        yield f"it lacks {some_of(missing)}"
    if unknown:
        yield f"it has {some_of(unknown)}, for which the model has no place"
    if misshapen:
        yield f"it has {some_of(misshapen)}"


def some_of(names: list[str]) -> str:
    """Return the first few names in words, and how many more there are."""
    rest = len(names) - _N_NAMED
    return ", ".join(names[:_N_NAMED]) + (f" and {rest} more" if rest > 0 else "")
