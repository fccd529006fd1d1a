"""A frozen front that works a batch ahead of the live stages."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.checkpoint import DATALOADER
from torchtitan.tools.logging import logger

from timelyfreeze.runtime import FrontRunAhead, split_batch, stages_of
from timelyfreeze.runtime.entering.ahead import Microbatches
from torchtitan.data.loader import Lookahead
from torchtitan.freezing.elastic.part import TrainerPart


class RunningAhead(TrainerPart):
    """Early forwards of the front. A rank has a single stage.

    Every rank reads the next batch if the front may begin early, so all ranks know whether there is
    a batch. Checkpoints save the loader at the position of the steps.
    """

    def attach(self, trainer: Any) -> None:
        """Read batches ahead of the steps, and let the front send over a group of its own."""
        super().attach(trainer)
        (stage,) = stages_of(trainer.pp_schedule)
        ranks = dist.get_process_group_ranks(stage.group)
        # Nothing is sent in the first step, which may take longer.
        timeout = timedelta(seconds=trainer.job_config.comm.train_timeout_seconds)
        group = dist.new_group(ranks, timeout=timeout)
        n_microbatches = trainer.controller.active_plan.order.n_microbatches
        self._ahead = FrontRunAhead(stage, n_microbatches, group)
        trainer.controller.parts.run_ahead(self._ahead)
        trainer.dataloader = self._lookahead = Lookahead(trainer.dataloader)
        trainer.checkpointer.states[DATALOADER] = self._lookahead
        self._n_batches_left = self._n_told = 0

    def before_step(self) -> None:
        """Count the batches of the next step."""
        self._n_batches_left = self.trainer.gradient_accumulation_steps

    @contextmanager
    def around_batch(self, inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> Iterator[None]:
        """Run a batch whose front was forwarded before, then forward the next batch's."""
        self._n_batches_left -= 1
        if self._ahead.n_front != self._n_told:
            self._n_told = self._ahead.n_front
            step = self.trainer.step
            logger.info(f"From step {step} on {self._n_told} stages work a batch ahead")
        upcoming = self._lookahead.peek() if self._may_begin_next else None
        self._ahead.begin_batch(
            partial(self._microbatches, inputs, labels),
            is_followed=self._n_batches_left > 0 or upcoming is not None,
        )
        yield
        self._ahead.end_batch(None if upcoming is None else partial(self._microbatches, *upcoming))

    @property
    def _may_begin_next(self) -> bool:
        """Whether the front goes on with the next step's batch, with nothing in between."""
        trainer, config = self.trainer, self.trainer.job_config
        if self._n_batches_left or not self._ahead.n_front:
            return False
        validates = config.validation.enable and trainer.validator.should_validate(trainer.step)
        saves = trainer.checkpointer.saves_after(trainer.step)
        between = validates or saves or trainer.controller.checks.decides
        return trainer.step < config.training.steps and not between

    def _microbatches(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> Microbatches:
        """Return the outside inputs of this rank's stage, as handed over by upstream."""
        trainer = self.trainer
        on_device = {
            name: value.to(trainer.device, non_blocking=True) for name, value in input_dict.items()
        }
        inputs, _, of_first, of_every = trainer.post_dataloading_process(on_device, labels)
        if not trainer.pp_has_first_stage:
            return split_batch(trainer.pp_schedule, (), of_every)
        return split_batch(trainer.pp_schedule, (inputs,), {**of_first, **of_every})
