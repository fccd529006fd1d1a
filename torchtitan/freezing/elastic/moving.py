"""A run that goes on in another trainer of the same processes."""

import gc
import logging
import time
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torchtitan.tools import utils as titan_tools

from timelyfreeze.policies import LORA
from torchtitan.freezing.elastic.part import Leave, SharedRun, TrainerPart
from torchtitan.settings import JobConfig
from torchtitan.upstream.fixes import without_last_pause


class MovingRun(TrainerPart):
    """A trainer after another, each with this part; ``build`` makes one.

    All processes stay, and a checkpoint's content goes through their memory.
    """

    step_seconds = 0.0  # of the last step on this rank; 0 if it was not in the present trainer

    def __init__(self, build: Callable[..., Any], told: JobConfig | None = None) -> None:
        self._build, self._run = build, SharedRun([self], told)
        self._left_at: float | None = None  # the last trainer, while the next is not loaded
        self._silenced = ExitStack()

    @abstractmethod
    def next_trainer(self) -> Leave | None:
        """Return the trainer of the next step, None for the present one."""

    @abstractmethod
    def arrive(self, step: int, seconds: float) -> None:
        """Log and write a move that is finished before a step."""

    def go_on(self, then: Leave) -> None:
        """Build the trainer of the run's next steps."""
        self._scaling, self.step_seconds, output = then.scaling, 0.0, self._run.output
        self.trainer = trainer = self._build(then.config, self._run)
        if trainer.controller is not None:
            trainer.controller.state.moves = self._run.told is None
        # A pipeline is never longer than the first, whose last ranks are shown.
        has_loss = not trainer.parallel_dims.pp_enabled or trainer.pp_has_last_stage
        assert output is None or not output.run.is_shown or has_loss

    def train(self) -> None:
        """Train to the end, in any number of trainers."""
        self.trainer.train()
        while self.trainer.leave is not None:
            self._move(self.trainer.leave)
            self.trainer.train()

    def close(self) -> None:
        """Close the trainer, or, if building has failed, its handed-over state."""
        self._silenced.close()
        if self.trainer is not None:
            self.trainer.close()
        elif self._run.output is not None:
            self._run.output.close()

    def _move(self, leave: Leave) -> None:
        """Go on with the next trainer, loaded from the last trainer's state."""
        self._silenced.close()
        self._left_at = time.perf_counter()
        trainer, self.trainer = self.trainer, None
        self._run.output = trainer.metrics_processor.leave()
        config, controller = trainer.job_config, trainer.controller
        scale = config.lora.scale if config.freezing.method == LORA else None
        memory = trainer.checkpointer.hand_over(trainer.device, scale)
        if controller is not None and controller.cache is not None:
            controller.cache.store.hand_over()
        trainer.close()
        step, heard = None if controller is None else controller.step, trainer.stop.heard
        del trainer, controller  # room for the next one
        gc.collect()
        if titan_tools.device_type != "cpu":
            titan_tools.device_module.empty_cache()
        with silence(logging.WARNING), warnings.catch_warnings():  # all was said at the start
            warnings.simplefilter("ignore")
            self.go_on(leave)
        self.trainer.checkpointer.take_over(memory)
        if self.trainer.controller is not None and step is not None:
            self.trainer.controller.step = step
        self.trainer.stop.heard = heard
        self._silenced.enter_context(silence(logging.INFO))

    def begin(self) -> None:
        """Finish a move: the trainer is loaded."""
        self._silenced.close()
        if self._left_at is not None:
            seconds, self._left_at = time.perf_counter() - self._left_at, None
            self.trainer.device_seconds += seconds * dist.get_world_size()
            self.arrive(self.trainer.step + 1, seconds)

    def before_step(self) -> Leave | None:
        """Leave if another trainer has the step; upstream's loop then ends without a word."""
        leave = self.next_trainer()
        if leave is not None:
            self._silenced.enter_context(silence(logging.INFO))
            self._silenced.enter_context(without_last_pause())
        return leave

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Run an optimizer step at this trainer's scaling."""
        trainer, started = self.trainer, time.perf_counter()
        with self._rate_scaled():
            yield
        if trainer.job_config.freezing.elastic.search_microbatches and trainer.device.type != "cpu":
            titan_tools.device_module.synchronize()
        self.step_seconds = time.perf_counter() - started
        for _ in range(1, self._scaling.growth):
            trainer.lr_schedulers.step()

    @contextmanager
    def _rate_scaled(self) -> Iterator[None]:
        """Take the schedule's learning rate times a factor, until the schedule sets the next."""
        factor = self._scaling.rate_factor_of(self.trainer.step)
        before = [(each, each.get_last_lr()) for each in self.trainer.lr_schedulers]
        for scheduler, rates in before:
            set_rates(scheduler, [factor * rate for rate in rates])
        try:
            yield
        except BaseException:  # the schedule has set nothing
            for scheduler, rates in before:
                set_rates(scheduler, rates)
            raise


def set_rates(scheduler: Any, rates: Sequence[float]) -> None:
    """Set learning rates of groups until the schedule sets the next."""
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    # What torch tells of the last rate, which upstream logs, is in a private name.
    scheduler._last_lr = list(rates)


@contextmanager
def silence(level: int) -> Iterator[None]:
    """Keep messages up to ``level`` out of the log."""
    before = logging.root.manager.disable
    logging.disable(max(before, level))
    try:
        yield
    finally:
        logging.disable(before)
