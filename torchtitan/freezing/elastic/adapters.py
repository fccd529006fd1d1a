"""A run in which adapters learn first, and then all weights: ``lora.until``."""

from collections.abc import Callable
from typing import Any

from torchtitan.tools.logging import logger

from torchtitan.freezing.checks.checkpoints import begins_with_adapters
from torchtitan.freezing.elastic.moving import MovingRun, set_rates
from torchtitan.freezing.elastic.part import Leave, SharedRun
from torchtitan.freezing.elastic.pipeline import BatchScaling
from torchtitan.settings import JobConfig, adapters_half, weights_half


class AdaptersFirst(MovingRun):
    """A trainer for each half of the run; a resumed run may begin with the second.

    Weights with merged adapters, data, schedule and metrics go on; the optimizer and freezing begin
    anew. ``register`` makes a half's train spec known.
    """

    def __init__(
        self,
        build: Callable[..., Any],
        register: Callable[[JobConfig], None],
        job_config: JobConfig,
    ) -> None:
        def build_half(half: JobConfig, run: SharedRun) -> Any:
            register(half)
            return build(half, run)

        super().__init__(build_half, told=job_config)
        self._config, self._adapts = job_config, begins_with_adapters(job_config)
        scaling = BatchScaling(rate_begins=job_config.lora.until)
        self._second = Leave(weights_half(job_config), scaling)
        self.go_on(Leave(adapters_half(job_config)) if self._adapts else self._second)
        self._stop = self.trainer.stop

    def train(self) -> None:
        """Train to the end; a signal to stop during the move stops the run after its next step."""
        with self._stop.listening():
            super().train()

    def next_trainer(self) -> Leave | None:
        """Return the trainer of all weights, once adapters have made their steps."""
        if not self._adapts or self.trainer.step < self._config.lora.until:
            return None
        self._adapts = False
        return self._second

    def arrive(self, step: int, seconds: float) -> None:
        """Take the rates of weights where the schedule is; log and write the finished move."""
        for scheduler in self.trainer.lr_schedulers.schedulers:
            bases = [group["initial_lr"] for group in scheduler.optimizer.param_groups]
            factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
            scheduler.base_lrs = bases
            set_rates(scheduler, [base * f for base, f in zip(bases, factors, strict=True)])
        self.trainer.stop.heard = self.trainer.stop.heard or self._stop.heard
        self.trainer.metrics_processor.record_move(step, 0, (), seconds)
        logger.info(
            "Adapters of rank %d are merged after step %d; all weights learn from step %d (method "
            '"%s", phases counted from there), after %.1f s',
            self._config.lora.rank,
            step - 1,
            step,
            self._config.freezing.method,
            seconds,
        )
