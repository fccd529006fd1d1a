"""Plain pipeline stages, turned into freezing ones."""

from collections.abc import Sequence
from typing import Any

from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from timelyfreeze.runtime.stage import FreezingStage


def adopt_stages(stages: Sequence[Any]) -> list[FreezingStage]:
    """Make plain pipeline stages freezing ones, in place; without a recorder nothing changes."""
    for stage in stages:
        kind, index = type(stage), getattr(stage, "stage_index", "?")
        if not isinstance(stage, PipelineStage):
            raise ValueError(
                f"stage {index} is a {kind.__name__}; it must be a PipelineStage of "
                "torch.distributed.pipelining"
            )
        if isinstance(stage.submod, DistributedDataParallel):
            raise ValueError(
                f"stage {index} is wrapped in DistributedDataParallel, which waits for the "
                "gradients of frozen tensors; shard it with fully_shard, or reduce its gradients "
                "yourself before the optimizer's step"
            )
        for name, parameter in stage.submod.named_parameters():
            if parameter.dtype.itemsize < 2:
                raise ValueError(
                    f"parameter {name!r} of stage {index} is stored as {parameter.dtype}; it must "
                    "have 16 bits or more, so load the model without quantization"
                )
        if not isinstance(stage, FreezingStage):
            is_plain = kind is PipelineStage
            both = None if is_plain else type(f"Freezing{kind.__name__}", (FreezingStage, kind), {})
            stage.__class__ = both or FreezingStage
        if stage.linears is not None:
            stage.linears.is_staged = True
    return list(stages)
