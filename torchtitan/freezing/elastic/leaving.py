"""What makes a trainer end before a step, so that another one can go on from there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torchtitan.distributed import ParallelDims
from torchtitan.train import Trainer

from torchtitan.checkpoints.handover import MemoryCheckpoint
from torchtitan.checkpoints.manager import SafeCheckpointManager
from torchtitan.freezing.config import JobConfig
from torchtitan.freezing.elastic.form import Form, Moment, Pace

Leaves = Callable[[Moment], Form | None]
KnownDims = dict[tuple[int, int, int], ParallelDims]


class _Left(BaseException):
    """The run goes on elsewhere. No ``Exception``: nobody on the way may report it as an error."""


class Leaving(Trainer):
    """Of a trainer of a part of a run the first base; the second is ``FreezingTrainer``.

    Args:
        job_config: What to train, and how.
        leaves: Asked before each step, on all ranks alike: how the run goes on elsewhere, None if
            it goes on here.
        pace: What its steps are.
        dims: Those of the trainers before, by degrees; takes this one's up.
    """

    def __init__(self, job_config: JobConfig, leaves: Leaves, pace: Pace, dims: KnownDims) -> None:
        self._leaves, self._pace, self._known_dims = leaves, pace, dims
        super().__init__(job_config)

    def init_distributed(self) -> ParallelDims:
        """Return dimensions, with the meshes of a former trainer that has the same.

        Meshes of the same ranks and names are equal, and torch's caches would go on with the
        process groups of the first of them.
        """
        found = super().init_distributed()
        return self._known_dims.setdefault((found.pp, found.dp_replicate, found.dp_shard), found)

    def should_continue_training(self) -> bool:
        """Return whether there is another step; leave if it is another trainer's."""
        goes_on = super().should_continue_training()
        if goes_on and self.controller is not None:
            checks = self.controller.checks
            n_frozen = 0 if checks is None else checks.frozen_layers
            # Larger steps take the schedule further, which checkpoints hold.
            n_batches = self.lr_schedulers.schedulers[0].last_epoch
            if (elsewhere := self._leaves(Moment(n_frozen, self.step, n_batches))) is not None:
                raise _Left(str(elsewhere))
        return goes_on

    def train(self) -> None:
        """Train to the end of the run, or until it goes on elsewhere."""
        try:
            super().train()
        except _Left as left:
            self.metrics_processor.end_run(f"goes on {left} after step {self.step}")

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Run one optimizer step at this trainer's pace."""
        with self._rate_scaled():
            super().train_step(data_iterator)
        for _ in range(1, self._pace.growth):
            self.lr_schedulers.step()

    @contextmanager
    def _rate_scaled(self) -> Iterator[None]:
        """Take the schedule's learning rate times a factor, until the schedule sets the next."""
        factor = self._pace.rate_factor
        groups = [group for each in self.optimizers for group in each.param_groups]
        before = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] *= factor
        for scheduler in self.lr_schedulers:
            # What torch tells of the last rate, which upstream logs, is in a private name.
            scheduler._last_lr = [factor * rate for rate in scheduler.get_last_lr()]
        try:
            yield
        except BaseException:  # the schedule has set nothing
            for group, rate in zip(groups, before, strict=True):
                group["lr"] = rate
            raise

    def hand_over(self) -> tuple[MemoryCheckpoint, int]:
        """Close; return what the run goes on from, and a signal to stop that came late, or 0."""
        memory = self._manager.hand_over(self.device)
        heard = 0 if self._stop is None else self._stop.heard
        self.close()
        return memory, heard

    def take_over(self, memory: MemoryCheckpoint, heard: int) -> None:
        """Go on from what another trainer has handed over."""
        self._manager.take_over(memory)
        if self._stop is not None:
            self._stop.heard = heard

    @property
    def _manager(self) -> SafeCheckpointManager:
        assert isinstance(self.checkpointer, SafeCheckpointManager)  # upstream's is replaced
        return self.checkpointer


def leaving(trainer: type[Trainer]) -> type[Leaving]:
    """Return ``FreezingTrainer``, or what stands in its place, as a trainer that may leave."""
    return type("LeavingTrainer", (Leaving, trainer), {})
