"""The tensors of a checkpoint, written as safetensors: a model's, or adapters alone for peft."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from torchtitan.checkpoints.contents import read_contents
from torchtitan.checkpoints.finished import INDEX_FILE
from torchtitan.hf.folder import SUFFIX
from torchtitan.lora import Lora
from torchtitan.lora.adapters import adapter_of, is_adapter


class StoredWeights:
    """The tensors of a checkpoint that torch has written, by name, and adapters merged in."""

    def __init__(self, checkpoint: Path, adapter_scale: float = 1.0) -> None:
        self._checkpoint = checkpoint
        self._adapter_scale = adapter_scale
        self._entries = read_contents(checkpoint).state_dict_metadata

    def __contains__(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor of that name."""
        return name in self._entries

    @property
    def has_adapters(self) -> bool:
        """Whether some weights have adapters beside them."""
        return any(map(is_adapter, self._entries))

    def dtype(self, name: str) -> torch.dtype:
        """Return the type in which a tensor lies in the checkpoint."""
        return self._entries[name].properties.dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._entries[name].size)

    def load(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the named tensors, in the order of ``names``, adapters merged into weights."""
        adapters = {name: pair for name in names if (pair := adapter_of(name))[1] in self}
        weights = self._read([*names, *(name for pair in adapters.values() for name in pair)])
        for name, (down, up) in adapters.items():
            added = self._adapter_scale * (weights.pop(up).float() @ weights.pop(down).float())
            # Frozen weights may be of a smaller type than what was learned.
            dtype = torch.promote_types(weights[name].dtype, self.dtype(up))
            weights[name] = (weights[name].float() + added).to(dtype)
        return weights

    def _read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read the named tensors and no others, in the order of ``names``."""
        weights = {
            name: torch.empty(self._entries[name].size, dtype=self.dtype(name)) for name in names
        }
        with warnings.catch_warnings():
            # There are no processes to agree with, which torch warns of.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(weights, checkpoint_id=self._checkpoint, no_dist=True)
        return weights

    def write(
        self,
        folder: Path,
        names: Sequence[str],
        translate: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
        *,
        dtype: torch.dtype | None,
        max_file_bytes: int,
    ) -> None:
        """Write tensors as ``model.safetensors``, or as several files of at most so many bytes."""
        groups = list(self._groups(names, dtype, max_file_bytes))
        places: dict[str, str] = {}
        total_size = 0
        for number, group in enumerate(groups, start=1):
            part = "" if len(groups) == 1 else f"-{number:05}-of-{len(groups):05}"
            file = f"model{part}{SUFFIX}"
            weights = {
                name: tensor.to(dtype or tensor.dtype).contiguous()
                for name, tensor in translate(self.load(group)).items()
            }
            path = folder / file
            path.touch()
            mode = path.stat().st_mode  # as that of every other file; the library hides its own
            save_file(weights, path, metadata={"format": "pt"})
            path.chmod(mode)
            places |= dict.fromkeys(weights, file)
            total_size += sum(tensor.nbytes for tensor in weights.values())
        if len(groups) > 1:
            index = {"metadata": {"total_size": total_size}, "weight_map": places}
            (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")

    def _groups(
        self, names: Sequence[str], dtype: torch.dtype | None, max_file_bytes: int
    ) -> Iterator[list[str]]:
        group: list[str] = []
        n_bytes = 0
        for name in names:
            size = self._entries[name].size.numel() * (dtype or self.dtype(name)).itemsize
            if group and n_bytes + size > max_file_bytes:
                yield group
                group, n_bytes = [], 0
            group.append(name)
            n_bytes += size
        yield group


_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."  # what peft puts before a model's own names
_Translate = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


def write_adapter(
    folder: Path,
    weights: StoredWeights,
    translate: _Translate,
    *,
    names: Iterable[str],
    lora: Lora,
    base: str,
    dtype: torch.dtype | None,
) -> None:
    """Write the adapters of a checkpoint into a folder that peft loads onto the model ``base``."""
    tensors, layers, every = {}, [], set()
    for name in names:
        (there,) = translate({name: torch.empty(weights.shape(name), device="meta")})
        every.add(there.removesuffix(".weight"))
        down, up = adapter_of(name)
        if up not in weights:
            continue
        layer = there.removesuffix(".weight")
        layers.append(layer)
        pair = weights.load([down, up])
        # What reorders the rows of a weight reorders those of what goes up.
        (reordered,) = translate({name: pair[up]}).values()
        tensors[f"{_PREFIX}{layer}.lora_A.weight"] = pair[down]
        tensors[f"{_PREFIX}{layer}.lora_B.weight"] = reordered
    cast = {n: t.to(dtype or t.dtype).contiguous() for n, t in tensors.items()}
    save_file(cast, folder / _WEIGHTS, metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "target_modules": _targets(layers, every),
        "inference_mode": True,
    }
    (folder / _CONFIG).write_text(json.dumps(settings, indent=2) + "\n")


def _targets(layers: list[str], every: set[str]) -> list[str]:
    """Return the last words of the layers' names, or whole names where words mean others too."""
    words = {layer.rpartition(".")[2] for layer in layers}
    meant = {name for name in every if name.rpartition(".")[2] in words}
    return sorted(words) if meant == set(layers) else layers
