"""A train spec whose stages have adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.config import Optimizer as OptimizerConfig
from torchtitan.distributed import ParallelDims
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

    def parallelized(part: nn.Module, dims: ParallelDims, config: JobConfig) -> nn.Module:
        dtype = TORCH_DTYPE_MAP[config.training.mixed_precision_param]
        # FSDP casts by itself, whatever learns.
        casts = dtype != torch.float32 and not dims.fsdp_enabled
        add_adapters(part, settings, seed, dtype if casts else None)
        return spec.parallelize_fn(part, dims, config)

    def optimizers(parts: list[nn.Module], config: OptimizerConfig, *args: Any, **more: Any) -> Any:
        faster = replace(config, lr=settings.rate(config.lr))
        # A stage may have no layer that gets an adapter; an optimizer of nothing is an error.
        learning = [part for part in parts if any(p.requires_grad for p in part.parameters())]
        return spec.build_optimizers_fn(learning, faster, *args, **more)

    return replace(spec, parallelize_fn=parallelized, build_optimizers_fn=optimizers)
