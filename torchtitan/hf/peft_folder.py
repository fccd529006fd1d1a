"""Adapters of a run as a folder that peft loads onto the model that the run began from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from torchtitan.hf.weights import StoredWeights
from torchtitan.lora import Lora
from torchtitan.lora.names import adapter_of

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
    """Write the adapters of a checkpoint into ``folder``.

    Args:
        folder: Where to; it must be there.
        weights: Of the checkpoint, which has adapters.
        translate: From names and weights here to those in the model's own folder.
        names: Weights of the model.
        lora: The section ``[lora]`` of the run.
        base: Folder or id of the model that the run began from.
        dtype: Type in the file; None for that of the checkpoint.
    """
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
