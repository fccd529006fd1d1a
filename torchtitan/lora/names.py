"""Names of linear layers that get an adapter, and of tensors in the checkpoints of such models.

A weight is called in a checkpoint as it is without adapters: ``layers.0.attention.wq.weight``. Its
adapter's two are ``layers.0.attention.wq.lora_A.default.weight`` and the same with ``lora_B``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

HEAD = "output"
BASE = "base_layer."
DOWN, UP = ".lora_A.default.weight", ".lora_B.default.weight"


def linear_layers(model: nn.Module) -> list[str]:
    """Return the names of a model's linear layers."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def is_meant(layer: str, target: str) -> bool:
    """Return whether ``target`` names a layer: whole, or by the last words of its name."""
    return layer == target or layer.endswith(f".{target}")


def chosen_layers(layers: Iterable[str], targets: Sequence[str]) -> list[str]:
    """Return those of ``layers`` that get an adapter; all but the head without ``targets``."""
    if not targets:
        return [layer for layer in layers if layer != HEAD]
    return [layer for layer in layers if any(is_meant(layer, target) for target in targets)]


def is_adapter(name: str) -> bool:
    """Return whether a tensor of a checkpoint is an adapter's."""
    return name.endswith((DOWN, UP))
