"""A trainer whose frozen front works a batch ahead of the live stages."""

from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.checkpoint import DATALOADER
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer

from timelyfreeze.runtime import FrontRunAhead, split_batch, stages_of
from timelyfreeze.runtime.entering.ahead import Microbatches
from torchtitan.checkpoints.manager import SafeCheckpointManager
from torchtitan.data.loader import Batch, Lookahead, ResizableDataloader
from torchtitan.data.sequences import ROWS
from torchtitan.settings import JobConfig

# Of a batch, what the model does not get.
_ABOUT_ROWS = ("n_tokens", ROWS)


class RunningAhead(Trainer):
    """The first base of such a trainer, before ``FreezingTrainer``. A rank has a single stage.

    Every rank reads the next batch if the front may begin early, so all ranks know whether there is
    a batch. Checkpoints save the loader at the position of the steps.
    """

    checkpointer: SafeCheckpointManager
    dataloader: ResizableDataloader

    def __init__(self, job_config: JobConfig) -> None:
        super().__init__(job_config)
        (stage,) = stages_of(self.pp_schedule)
        ranks = dist.get_process_group_ranks(stage.group)
        # Nothing is sent in the first step, which may take longer.
        timeout = timedelta(seconds=job_config.comm.train_timeout_seconds)
        group = dist.new_group(ranks, timeout=timeout)
        n_microbatches = self.controller.order.n_microbatches
        self._ahead = FrontRunAhead(stage, n_microbatches, group)
        self.controller.run_ahead(self._ahead)
        self._lookahead = Lookahead(self.dataloader)
        self.checkpointer.states[DATALOADER] = self._lookahead
        self._n_batches_left = self._n_told = 0

    def batch_generator(self, data_iterable: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the loader's batches; they count when they are used."""
        return super().batch_generator(self._lookahead)

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """Run an optimizer step, and early forwards of the front for the next."""
        self._n_batches_left = self.gradient_accumulation_steps
        super().train_step(data_iterator)

    def forward_backward_step(self, **batch: Any) -> torch.Tensor:
        """Run a pipeline batch; a front has forwarded its batch before, and then goes on."""
        self._n_batches_left -= 1
        if self._ahead.n_front != self._n_told:
            self._n_told = self._ahead.n_front
            logger.info(f"From step {self.step} on {self._n_told} stages work a batch ahead")
        upcoming = self._lookahead.peek() if self._may_begin_next else None
        self._ahead.begin_batch(
            partial(self._microbatches, batch["input_dict"], batch["labels"]),
            is_followed=self._n_batches_left > 0 or upcoming is not None,
        )
        loss = super().forward_backward_step(**batch)
        self._ahead.end_batch(None if upcoming is None else partial(self._microbatches, *upcoming))
        return loss

    @property
    def _may_begin_next(self) -> bool:
        """Whether the front goes on with the next step's batch, with nothing in between."""
        if self._n_batches_left or not self._ahead.n_front:
            return False
        validates = self.job_config.validation.enable and self.validator.should_validate(self.step)
        saves = self.checkpointer.saves_after(self.step)
        between = validates or saves or self.controller.checks.decides
        return self.step < self.job_config.training.steps and not between

    def _microbatches(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> Microbatches:
        """Return the outside inputs of this rank's stage, as handed over by upstream."""
        on_device = {
            name: value.to(self.device, non_blocking=True)
            for name, value in input_dict.items()
            if name not in _ABOUT_ROWS
        }
        inputs, _, of_first, of_every = self.post_dataloading_process(on_device, labels)
        if not self.pp_has_first_stage:
            return split_batch(self.pp_schedule, (), of_every)
        return split_batch(self.pp_schedule, (inputs,), {**of_first, **of_every})
