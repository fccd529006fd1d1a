"""A train spec whose stages have adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn
from torchtitan.config import Optimizer as OptimizerConfig
from torchtitan.protocols.train_spec import TrainSpec

from torchtitan.lora.adapters import add_adapters
from torchtitan.lora.settings import Lora


def with_adapters(spec: TrainSpec, settings: Lora, seed: int) -> TrainSpec:
    """Return ``spec`` with adapters in each stage, which learn at their own rate.

    Args:
        spec: Of the model without adapters.
        settings: The section ``[lora]``.
        seed: As for ``add_adapters``.
    """

    def parallelized(part: nn.Module, *args: Any) -> nn.Module:
        return spec.parallelize_fn(add_adapters(part, settings, seed), *args)

    def optimizers(parts: list[nn.Module], config: OptimizerConfig, *args: Any, **more: Any) -> Any:
        faster = replace(config, lr=settings.rate(config.lr))
        # A stage may have no layer that gets an adapter; an optimizer of nothing is an error.
        learning = [part for part in parts if any(p.requires_grad for p in part.parameters())]
        return spec.build_optimizers_fn(learning, faster, *args, **more)

    return replace(spec, parallelize_fn=parallelized, build_optimizers_fn=optimizers)
