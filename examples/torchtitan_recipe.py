"""TorchTitan 0.3 with freezing: a trainer, and a recipe for upstream's LLaMA debug model.

    PYTHONPATH=examples torchrun --nproc_per_node=4 -m torchtitan.train \
        --module torchtitan_recipe --config llama3_debugmodel_freezing

It needs torch 2.14.1 and torchtitan 0.3.0, which scripts/test_hosts.sh installs. For another model,
write a recipe like the one at the end.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch.distributed as dist
import torchtitan.distributed.utils as titan_utils
from torch import Tensor
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.config import ParallelismConfig
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from timelyfreeze import FreezeSettings, TimelyFreeze


@dataclass(frozen=True)
class Freezing(FreezeSettings):
    """The section ``freezing``: what TimelyFreeze takes, see docs/library.md."""

    method: str = "timelyfreeze"


class FreezingTrainer(Trainer):
    """Upstream's trainer, whose pipeline freezes by a plan."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """Upstream's settings and the section ``freezing``."""

        freezing: Freezing = Freezing()

        def __post_init__(self) -> None:
            """Refuse what cannot freeze, upstream's default loss among it."""
            degree, loss = self.parallelism.pipeline_parallel_degree, self.loss
            if degree < 2 or isinstance(loss, ChunkedLossWrapper.Config):
                raise ValueError(
                    f"parallelism.pipeline_parallel_degree is {degree} and loss is {loss}; "
                    "freezing needs a degree above 1, and of a ChunkedLossWrapper its loss.loss_fn"
                )
            Trainer.Config.__post_init__(self)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        section = asdict(config.freezing)
        self.freezer = TimelyFreeze(self.pp_schedule, optimizer=[*self.optimizers], **section)
        # Looked up when a checkpoint is written or read. A disabled checkpointer has no states.
        getattr(self.checkpointer, "states", {})["freezer"] = self.freezer

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        """Take an optimizer step, with all its batches."""
        with self.freezer.step(self.step):
            super().train_step(data_iterator)

    def train(self) -> None:
        """Train, and log what freezing has brought."""
        with self.freezer:
            super().train()
            report = self.freezer.report()  # of all ranks together
        if dist.get_rank() == 0:
            logger.info("%s", report)


def clip_on_device(parameters: list[Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Clip where the parameters are, also on a rank frozen whole.

    It has no gradients, and upstream makes their norm on the CPU, which NCCL cannot add.
    """
    with parameters[0].device:
        return upstream_clip(parameters, *args, **kwargs)


upstream_clip, titan_utils.clip_grad_norm_ = titan_utils.clip_grad_norm_, clip_on_device


def llama3_debugmodel_freezing() -> FreezingTrainer.Config:
    """Return a recipe that goes through all phases of freezing in 40 steps, on 4 ranks."""
    base = llama3_debugmodel()
    base.training.steps, base.training.disable_cuda_graphs = 40, True
    base.loss, base.parallelism = base.loss.loss_fn, ParallelismConfig(pipeline_parallel_degree=4)
    phases = Freezing(last_warmup_step=6, last_monitor_step=18, last_ramp_step=24)
    given = {each.name: getattr(base, each.name) for each in fields(base)}
    return FreezingTrainer.Config(**given, freezing=phases)
