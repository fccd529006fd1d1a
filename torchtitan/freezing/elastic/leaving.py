"""What makes a trainer end before a step, so that another one can go on from there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils as titan_tools
from torchtitan.train import Trainer

from timelyfreeze.settings import Phase
from torchtitan.checkpoints.handover import MemoryCheckpoint
from torchtitan.checkpoints.manager import SafeCheckpointManager
from torchtitan.freezing.config import JobConfig
from torchtitan.freezing.elastic.form import Form, Moment, Pace
from torchtitan.freezing.report.output import RunOutput
from torchtitan.freezing.report.progress import quiet_unless

Leaves = Callable[[Moment], Form | None]
KnownDims = dict[tuple[int, int, int], ParallelDims]


class _Left(BaseException):
    """The run goes on elsewhere. No ``Exception``: nobody on the way may report it as an error."""


@dataclass(frozen=True)
class HandedOver:
    """What a run goes on from in another trainer.

    Attributes:
        memory: What a checkpoint would hold.
        heard: A signal to stop that came late, or 0.
        phase: Of the last step; None if there was none since the run was resumed.
        output: What the run is shown and recorded by.
    """

    memory: MemoryCheckpoint
    heard: int
    phase: Phase | None
    output: RunOutput


class Leaving(Trainer):
    """Of a trainer of a part of a run the first base; the second is ``FreezingTrainer``.

    Args:
        job_config: What to train, and how.
        leaves: Asked before each step, on all ranks alike: how the run goes on elsewhere, None if
            it goes on here.
        pace: What its steps are.
        dims: Those of the trainers before, by degrees; takes this one's up.
        output: Of the run that goes on here; None if it begins here.
    """

    def __init__(
        self,
        job_config: JobConfig,
        leaves: Leaves,
        pace: Pace,
        dims: KnownDims,
        output: RunOutput | None = None,
    ) -> None:
        self._leaves, self._pace, self._known_dims = leaves, pace, dims
        self._step_seconds = 0.0
        self._left_with: RunOutput | None = None
        self._arrived: Callable[[], None] = lambda: None
        self._until_arrived = ExitStack()
        self.output = output
        super().__init__(job_config)
        if self.controller is not None:
            self.controller.moves = True
        # A pipeline is never longer than the first, whose last ranks are shown.
        assert output is None or not output.is_shown or self.pp_has_last_stage

    def init_distributed(self) -> ParallelDims:
        """Return dimensions, with the meshes of a former trainer that has the same.

        Meshes of the same ranks and names are equal, and torch's caches would go on with the
        process groups of the first of them.
        """
        found = super().init_distributed()
        if self.output is not None:
            quiet_unless(self.output.is_shown, dist.get_rank())
        return self._known_dims.setdefault((found.pp, found.dp_replicate, found.dp_shard), found)

    def should_continue_training(self) -> bool:
        """Return whether there is another step; leave if it is another trainer's."""
        self._until_arrived.close()
        arrived, self._arrived = self._arrived, lambda: None
        arrived()
        goes_on = super().should_continue_training()
        if goes_on and self.controller is not None:
            n_frozen = self.controller.settled_front
            # Larger steps take the schedule further, which checkpoints hold.
            n_batches = self.lr_schedulers.schedulers[0].last_epoch
            moment = Moment(n_frozen, self.step, n_batches, self._step_seconds)
            if self._leaves(moment) is not None:
                raise _Left
        return goes_on

    def train(self) -> None:
        """Train to the end of the run, or until it goes on elsewhere."""
        try:
            with self._until_arrived:
                super().train()
        except _Left:
            self._left_with = self.metrics_processor.leave()

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Run one optimizer step at this trainer's pace."""
        started = time.perf_counter()
        with self._rate_scaled():
            super().train_step(data_iterator)
        if self.job_config.freezing.elastic.search_microbatches and self.device.type != "cpu":
            titan_tools.device_module.synchronize()
        self._step_seconds = time.perf_counter() - started
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

    def hand_over(self) -> HandedOver:
        """Close; return what the run goes on from."""
        assert self.controller is not None  # it has asked for another pipeline
        assert self._left_with is not None  # likewise
        memory = self._manager.hand_over(self.device)
        if self.controller.cache is not None:
            self.controller.cache.hand_over()
        heard = 0 if self._stop is None else self._stop.heard
        self.close()
        return HandedOver(memory, heard, self.controller.entered_phase, self._left_with)

    def take_over(self, handed: HandedOver, arrived: Callable[[], None]) -> None:
        """Go on from what another trainer has handed over.

        Args:
            handed: By the trainer before; loaded when training begins.
            arrived: Called once it is loaded, before the first step; until then the log has
                warnings alone.
        """
        assert self.controller is not None  # the trainer before had one
        self._manager.take_over(handed.memory)
        self.controller.go_on_in(handed.phase)
        if self._stop is not None:
            self._stop.heard = handed.heard
        self._arrived = arrived
        self._until_arrived.enter_context(silence(logging.INFO))

    @property
    def _manager(self) -> SafeCheckpointManager:
        assert isinstance(self.checkpointer, SafeCheckpointManager)  # upstream's is replaced
        return self.checkpointer


def leaving(trainer: type[Trainer]) -> type[Leaving]:
    """Return ``FreezingTrainer``, or what stands in its place, as a trainer that may leave."""
    return type("LeavingTrainer", (Leaving, trainer), {})


@contextmanager
def silence(level: int) -> Iterator[None]:
    """Keep what is said up to ``level`` out of the log."""
    before = logging.root.manager.disable
    logging.disable(max(before, level))
    try:
        yield
    finally:
        logging.disable(before)
