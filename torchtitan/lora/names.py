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


def adapter_shapes(
    model: nn.Module, layers: Iterable[str], rank: int
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the adapters of ``layers``, by its name."""
    shapes = {}
    for name in layers:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        shapes[name + DOWN] = rank, layer.in_features
        shapes[name + UP] = layer.out_features, rank
    return shapes


def adapter_of(weight: str) -> tuple[str, str]:
    """Return the names of the two tensors of a weight's adapter: that goes down, that goes up."""
    layer = weight.removesuffix(".weight")
    return layer + DOWN, layer + UP


def is_adapter(name: str) -> bool:
    """Return whether a tensor of a checkpoint is an adapter's."""
    return name.endswith((DOWN, UP))
