"""TorchTitan 0.3 with freezing: a trainer, and a recipe for upstream's LLaMA debug model.

    PYTHONPATH=examples torchrun --nproc_per_node=4 -m torchtitan.train \
        --module torchtitan_recipe --config llama3_debugmodel_freezing

It needs an environment of its own, see docs/torchtitan_recipe.md. For another model, write a recipe
like the one at the end, or hand any of upstream's to ``with_freezing``.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch.distributed as dist
import torchtitan.distributed.utils as titan_utils
from torch import Tensor
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from timelyfreeze import TimelyFreeze

upstream_clip = titan_utils.clip_grad_norm_


@dataclass(kw_only=True, slots=True)
class FreezingConfig:
    """The section ``freezing``: what TimelyFreeze takes, see docs/library.md."""

    enable: bool = True
    method: str = "timelyfreeze"
    last_warmup_step: int = 60
    last_monitor_step: int = 100
    last_ramp_step: int = 200
    max_freeze_ratio: float | Literal["auto"] = "auto"
    min_gain: float = 0.02
    monitoring: Literal["halves", "mixed"] = "halves"
    seed: int = 42


class FreezingTrainer(Trainer):
    """Upstream's trainer, whose pipeline freezes by a plan.

    Raises:
        ValueError: If there is no pipeline, or if something else than the schedule goes backward.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """Upstream's settings and the section ``freezing``."""

        freezing: FreezingConfig = field(default_factory=FreezingConfig)

    def __init__(self, config: Config) -> None:
        self.freezer: TimelyFreeze | None = None
        if config.freezing.enable:
            check(config)
        super().__init__(config)
        if not config.freezing.enable:
            return
        settings = {f.name: getattr(config.freezing, f.name) for f in fields(FreezingConfig)}
        del settings["enable"]
        self.freezer = TimelyFreeze(self.pp_schedule, optimizer=[*self.optimizers], **settings)
        # Its own entry, so that checkpoint.exclude_from_loading can name it. The checkpointer looks
        # up what it saves when it saves, and a disabled one has nothing to look up.
        if config.checkpoint.enable:
            self.checkpointer.states["freezer"] = self.freezer
        titan_utils.clip_grad_norm_ = clip_on_device

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        """Take an optimizer step: all its batches, clipping, and the step itself, are one step.

        Around ``pp_forward_backward_step`` it would be one for each batch of an accumulation.
        """
        with nullcontext() if self.freezer is None else self.freezer.step(self.step):
            super().train_step(data_iterator)

    def train(self) -> None:
        """Train, and report what freezing has brought.

        Not in ``close``, which also runs after a failure of this rank alone: all ranks report
        together.
        """
        super().train()
        if self.freezer is not None and self.step:
            report = self.freezer.report()
            if dist.get_rank() == 0:
                logger.info("%s", report)

    def close(self) -> None:
        """End what freezing runs in the background, too."""
        if self.freezer is not None:
            self.freezer.close()
        super().close()


def check(config: FreezingTrainer.Config) -> None:
    """Raise for settings with which frozen tensors would get gradients, or nothing could freeze."""
    if config.parallelism.pipeline_parallel_degree < 2:
        raise ValueError(
            "freezing needs a pipeline, and parallelism.pipeline_parallel_degree is "
            f"{config.parallelism.pipeline_parallel_degree}; set it to 2 or more, or "
            "freezing.enable to False"
        )
    if isinstance(config.loss, ChunkedLossWrapper.Config):
        raise ValueError(
            "loss is a ChunkedLossWrapper, which goes backward through lm_head inside the forward, "
            "so that lm_head would learn where it is frozen; set loss to its own loss.loss_fn"
        )


def clip_on_device(parameters: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Clip where the parameters are.

    A rank whose tensors are all frozen has no gradients. Their norm is made on the CPU, unless a
    device is set, and NCCL cannot add that to those of other ranks.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    with parameters[0].device:
        return upstream_clip(parameters, *args, **kwargs)


def with_freezing(base: Trainer.Config, freezing: FreezingConfig) -> FreezingTrainer.Config:
    """Return one of upstream's recipes as one that freezes."""
    given = {f.name: getattr(base, f.name) for f in fields(base)}
    if isinstance(base.loss, ChunkedLossWrapper.Config):
        given["loss"] = base.loss.loss_fn
    return FreezingTrainer.Config(**given, freezing=freezing)


def llama3_debugmodel_freezing() -> FreezingTrainer.Config:
    """Return a recipe that goes through all phases of freezing in 40 steps, on 4 ranks."""
    base = llama3_debugmodel()
    base.training.disable_cuda_graphs = True  # with which upstream refuses pipelines
    base.training.steps = 40
    base.training.local_batch_size = 8
    base.parallelism.pipeline_parallel_degree = 4
    base.parallelism.pipeline_parallel_schedule = "1F1B"
    base.parallelism.pipeline_parallel_microbatch_size = 1
    return with_freezing(
        base, FreezingConfig(last_warmup_step=6, last_monitor_step=18, last_ramp_step=24)
    )
