"""AutoFreeze's efficiency packing: a part of a run, which ends where fewer ranks will do."""

from __future__ import annotations

import time

import torch.distributed as dist
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer

from timelyfreeze.cli.torchrun import Part, present_part
from torchtitan.freezing.config import JobConfig
from torchtitan.freezing.elastic.packing import fewest_ranks
from torchtitan.freezing.elastic.pipeline import Pipeline, first_pipeline


class RunPart(Trainer):
    """Of such a trainer the first base; the second is ``FreezingTrainer``.

    It ends before a step for which the model needs another number of ranks, with a checkpoint and a
    word to the command that has started it.
    """

    def __init__(self, job_config: JobConfig) -> None:
        self._former = present_part()
        self._pipeline = self._next = first_pipeline(job_config)
        self._first, self._start = self._pipeline, job_config
        if self._former is not None:
            self._first = Pipeline(tuple(self._former.first_split))
            self._start = self._first.moved(job_config)
        self._n_frozen: int | None = None
        self._left_at = 0.0
        super().__init__(job_config)

    def should_continue_training(self) -> bool:
        """Return whether there is another step for as many ranks."""
        goes_on = super().should_continue_training()
        if (former := self._former) is not None:
            self._former = None
            # From the last step of the part before; those of its processes are counted that stay.
            self.device_seconds += former.n_former * (time.time() - former.left_at)
        if not goes_on or self.controller is None:
            return goes_on
        n_frozen = self.controller.settled_front
        if n_frozen == self._n_frozen:
            return True
        self._n_frozen = n_frozen
        found = fewest_ranks(self._start, n_frozen)
        if found.n_ranks == self._pipeline.n_ranks:
            return True
        self._next, self._left_at = found, time.time()
        self.why_early = f"{n_frozen} layers are frozen, and the run goes on {found}"
        return False

    def train(self) -> None:
        """Train to the end of the run, or until it goes on with other processes."""
        super().train()
        if self._next is self._pipeline:
            return
        if dist.get_rank() == 0:
            Part(self._next.split, self._first.split, self._pipeline.n_ranks, self._left_at).leave()
        logger.info(
            "Frozen layers: %d; the run goes on %s instead of %d, from the checkpoint of step %d",
            self._n_frozen,
            self._next,
            self._pipeline.n_ranks,
            self.step,
        )


def in_parts(trainer: type[Trainer]) -> type[RunPart]:
    """Return ``FreezingTrainer``, or what stands in its place, as a trainer of a part of a run."""
    return type("PartTrainer", (RunPart, trainer), {})


def present_config(job_config: JobConfig) -> JobConfig:
    """Return the configuration of this part of a run, of that which the run began with."""
    part = present_part()
    return job_config if part is None else Pipeline(tuple(part.split)).moved(job_config)
