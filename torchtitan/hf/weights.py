"""The tensors of a checkpoint, written as safetensors: a model's, or adapters alone for peft."""

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from torchtitan.checkpoints.contents import read_contents, readable
from torchtitan.checkpoints.finished import INDEX_FILE
from torchtitan.lora import Lora
from torchtitan.lora.adapters import adapter_of, is_adapter, merged


class StoredWeights:
    """The tensors of a checkpoint of torch, by name, with adapters merged.

    Their type is ``dtype``, or the checkpoint's.
    """

    def __init__(
        self, checkpoint: Path, adapter_scale: float = 1.0, dtype: torch.dtype | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._adapter_scale = adapter_scale
        self._dtype = dtype
        with readable(checkpoint):
            self._entries = read_contents(checkpoint).state_dict_metadata

    def __contains__(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor of this name."""
        return name in self._entries

    def require(self, names: Iterable[str]) -> None:
        """Raise ValueError for a named tensor missing in the checkpoint."""
        for name in names:
            if name not in self:
                raise ValueError(f"{str(self._checkpoint)!r} lacks {name} of the run's model")

    @property
    def has_adapters(self) -> bool:
        """Whether some weights have adapters beside them."""
        return any(map(is_adapter, self._entries))

    def empty(self, name: str, device: str = "meta") -> Tensor:
        """Return a tensor in the checkpoint's type and shape, without its values."""
        entry = self._entries[name]
        return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a tensor when loaded."""
        pair = [one for one in adapter_of(name) if one in self]
        # Frozen weights may be of a smaller type than what was learned.
        own = reduce(torch.promote_types, (self.empty(one).dtype for one in [name, *pair]))
        return self._dtype or own

    def load(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the named tensors, in the order of ``names``, adapters merged into weights."""
        adapters = {name: pair for name in names if (pair := adapter_of(name))[1] in self}
        every = [*names, *(name for pair in adapters.values() for name in pair)]
        weights = {name: self.empty(name, "cpu") for name in every}
        with warnings.catch_warnings():
            # There are no processes to agree with, which torch warns of.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            with readable(self._checkpoint):
                dcp.load(weights, checkpoint_id=self._checkpoint, no_dist=True)
        whole = merged(weights, self._adapter_scale) if adapters else weights
        return {name: whole[name].to(self.dtype(name)) for name in names}


@dataclass(frozen=True)
class FolderForm:
    """Contents of a model's folder.

    ``names`` are the tensors to write, by their names here, turned into the files' names by
    ``translate``. ``settings`` makes ``config.json``, and writes further files of transformers into
    the folder.
    """

    names: Sequence[str]
    translate: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
    settings: Callable[[Path], dict[str, Any]]

    def empty(self, name: str, weights: StoredWeights) -> tuple[str, Tensor]:
        """Return the name of a tensor in the files, and the tensor without its values."""
        empty = weights.empty(name).to(weights.dtype(name))
        ((there, tensor),) = self.translate({name: empty}).items()
        return there, tensor


def write_weights(
    folder: Path, weights: StoredWeights, form: FolderForm, max_file_bytes: int
) -> None:
    """Write tensors as ``model.safetensors``, or as several files of at most so many bytes."""
    tensors, names = {}, {}
    for name in form.names:
        there, tensors[there] = form.empty(name, weights)
        names[there] = name
    files = split_torch_state_dict_into_shards(tensors, max_shard_size=max_file_bytes)
    for file, group in files.filename_to_tensors.items():
        _save(folder / file, form.translate(weights.load([names[there] for there in group])))
    if files.is_sharded:
        index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
        write_json(folder / INDEX_FILE, index)


def _save(path: Path, weights: Mapping[str, Tensor]) -> None:
    path.touch()
    mode = path.stat().st_mode  # as that of every other file; the library hides its own
    whole = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(whole, path, metadata={"format": "pt"})
    path.chmod(mode)


def write_json(path: Path, value: Any) -> None:
    """Write plain data as a readable file."""
    path.write_text(json.dumps(value, indent=2) + "\n")


_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."  # what peft puts before a model's own names


def write_adapter(
    folder: Path, weights: StoredWeights, form: FolderForm, lora: Lora, base: str
) -> None:
    """Write the adapters of a checkpoint into a folder for peft, on the model ``base``."""
    tensors, layers, every = {}, [], set()
    for name in form.names:
        layer = form.empty(name, weights)[0].removesuffix(".weight")
        every.add(layer)
        down, up = adapter_of(name)
        if up not in weights:
            continue
        layers.append(layer)
        pair = weights.load([down, up])
        # What reorders the rows of a weight reorders those of what goes up.
        (reordered,) = form.translate({name: pair[up]}).values()
        tensors[f"{_PREFIX}{layer}.lora_A.weight"] = pair[down]
        tensors[f"{_PREFIX}{layer}.lora_B.weight"] = reordered
    _save(folder / _WEIGHTS, tensors)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "target_modules": _targets(layers, every),
        "inference_mode": True,
    }
    write_json(folder / _CONFIG, settings)


def _targets(layers: list[str], every: set[str]) -> list[str]:
    """Return the last words of the layers' names, or whole names where words mean others too."""
    words = {layer.rpartition(".")[2] for layer in layers}
    meant = {name for name in every if name.rpartition(".")[2] in words}
    return sorted(words) if meant == set(layers) else layers
