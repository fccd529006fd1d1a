"""A run in which adapters learn first, and then all weights: ``lora.until``."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer

from torchtitan.freezing.checks.checkpoints import begins_with_adapters
from torchtitan.freezing.elastic.pipeline import BatchScaling
from torchtitan.freezing.elastic.run import HandoverTrainer, KnownDims, rebuilding
from torchtitan.freezing.report.recorder import RunRecorder
from torchtitan.settings import JobConfig, adapters_half, weights_half


class AdaptersFirst:
    """A trainer for each half of the run; a resumed run may begin with the second.

    All processes stay. Weights with merged adapters, data, schedule and metrics go through their
    memory; the optimizer and freezing begin anew. ``register`` makes a half's train spec known.
    """

    def __init__(
        self, trainer: type[Trainer], register: Callable[[JobConfig], None], job_config: JobConfig
    ) -> None:
        self._build = type("HalfTrainer", (HandoverTrainer, trainer), {})
        self._register, self._config = register, job_config
        self._dims: KnownDims = {}
        self._output: RunRecorder | None = None
        self._trainer: HandoverTrainer | None = None
        self._trainer = self._half(adapters=begins_with_adapters(job_config))

    def _half(self, *, adapters: bool) -> HandoverTrainer:
        whole, until = self._config, self._config.lora.until
        config = adapters_half(whole) if adapters else weights_half(whole)
        scaling = BatchScaling() if adapters else BatchScaling(rate_begins=until)
        self._register(config)
        return self._build(
            config,
            lambda moment: config if adapters and moment.step >= until else None,
            scaling,
            self._dims,
            self._output,
            whole,
        )

    def train(self) -> None:
        """Train to the end; a signal to stop during the move stops the run after its next step."""
        assert self._trainer is not None
        stop = self._trainer.stop
        with stop.listening():
            self._trainer.train()
            if self._trainer.left_with is not None:
                self._move(stop)
                self._trainer.train()

    def close(self) -> None:
        """Close the trainer, or, if building has failed, its handed-over state."""
        if self._trainer is not None:
            self._trainer.close()
        elif self._output is not None:
            self._output.close()

    def _move(self, stop: Any) -> None:
        """Go on with all weights."""
        assert self._trainer is not None
        started, handed = time.perf_counter(), self._trainer.hand_over()
        self._trainer, self._output = None, handed.output  # room for the next one
        with rebuilding():
            self._trainer = self._half(adapters=False)
        self._trainer.take_over(handed, partial(self._arrive, self._trainer, stop, started))

    def _arrive(self, trainer: HandoverTrainer, stop: Any, started: float) -> None:
        """Take the rates of weights where the schedule is; log and write the finished move."""
        for scheduler in trainer.lr_schedulers.schedulers:
            groups = scheduler.optimizer.param_groups
            scheduler.base_lrs = [group["initial_lr"] for group in groups]
            for group, factor in zip(groups, scheduler.lr_lambdas, strict=True):
                group["lr"] = group["initial_lr"] * factor(scheduler.last_epoch)
            scheduler._last_lr = [group["lr"] for group in groups]
        trainer.stop.heard = trainer.stop.heard or stop.heard
        seconds, step = time.perf_counter() - started, trainer.step
        trainer.device_seconds += seconds * dist.get_world_size()
        trainer.metrics_processor.record_move(step + 1, 0, (), seconds)
        logger.info(
            "Adapters of rank %d are merged after step %d; all weights learn from step %d (method "
            '"%s", phases counted from there), after %.1f s',
            self._config.lora.rank,
            step,
            step + 1,
            self._config.freezing.method,
            seconds,
        )
