"""The tensors of a checkpoint, written as safetensors one file at a time."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from torchtitan.checkpoints.contents import read_contents
from torchtitan.checkpoints.finished import INDEX_FILE
from torchtitan.hf.folder import SUFFIX
from torchtitan.lora.names import adapter_of, is_adapter


class StoredWeights:
    """The tensors of a checkpoint that torch's distributed checkpointing wrote, by name.

    Args:
        checkpoint: Folder of one step. Only its table of contents is read here.
        adapter_scale: What adapters are multiplied by where they are merged into their weights.
    """

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
        """Write tensors as ``model.safetensors``, or as several such files and their index.

        Args:
            folder: Where to; it must be there.
            names: Which tensors, in the order of the files.
            translate: From names and tensors here to those in the files.
            dtype: Type in the files; None for that of the checkpoint.
            max_file_bytes: A file ends before the tensor that would make it larger than this.
        """
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
        """Yield the names of each file's tensors."""
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
