"""A run rebuilt in another form, whenever its frozen part asks for a new form."""

from __future__ import annotations

import gc
import json
import logging
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils as titan_tools
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer

from timelyfreeze.policies import LORA
from timelyfreeze.runtime import Exchange
from timelyfreeze.settings import Phase
from torchtitan.checkpoints.handover import MemoryCheckpoint
from torchtitan.checkpoints.manager import SafeCheckpointManager
from torchtitan.freezing.checks import check
from torchtitan.freezing.elastic.packing import PackedBatch, first_batch, packed_batch
from torchtitan.freezing.elastic.pipeline import (
    BatchScaling,
    MicrobatchSearch,
    Pipeline,
    RunState,
    first_pipeline,
    pipeline_for,
)
from torchtitan.freezing.report.progress import quiet_unless
from torchtitan.freezing.report.recorder import FreezingMetricsProcessor, RunRecorder
from torchtitan.freezing.values.command_line import ConfigError
from torchtitan.settings import JobConfig

# One way for a run to go on; in words, how, such as "in a pipeline of 2 ranks".
Form = Pipeline | PackedBatch


class ElasticRun:
    """A trainer per form of the run, for as long as the form suits.

    All processes stay, and a checkpoint's content goes through their memory.
    """

    def __init__(self, trainer: type[Trainer], job_config: JobConfig) -> None:
        self._build = type("LeavingTrainer", (HandoverTrainer, trainer), {})
        self._config = job_config
        packs = job_config.freezing.packing.is_on
        self._form: Form = first_batch(job_config) if packs else first_pipeline(job_config)
        self._next = self._form
        self._n_frozen = -1  # not known yet
        self._search: MicrobatchSearch | None = None
        if job_config.freezing.elastic.searches:
            self._search = MicrobatchSearch(job_config, lambda s: max(Exchange().all_gather(s)))
        self._dims: KnownDims = {}
        self._output: RunRecorder | None = None
        self._trainer: HandoverTrainer | None = self._build(
            job_config, self._leaves, BatchScaling(), self._dims
        )
        self._joining = MoveBarrier(
            _get_default_store(),  # torchrun's; torch has no public name for it
            dist.get_rank(),
            dist.get_world_size(),
            job_config.freezing.elastic.join_limit_s,
        )

    def train(self) -> None:
        """Train to the end, in any number of forms."""
        while self._trainer is not None:
            self._trainer.train()
            if self._next == self._form:
                return
            started = time.perf_counter()
            self._move(self._trainer.hand_over(), started)

    def close(self) -> None:
        """Close the trainer, or, if building has failed, its handed-over state."""
        if self._trainer is not None:
            self._trainer.close()
        elif self._output is not None:
            self._output.close()

    def _leaves(self, moment: RunState) -> Form | None:
        """Return the run's next form, None to stay; the same on all ranks."""
        if moment.step == 0:
            return None  # torch would hand over an optimizer that has made a step
        wanted = self._form
        if moment.n_frozen != self._n_frozen:
            self._n_frozen = moment.n_frozen
            if self._config.freezing.packing.is_on:
                wanted = packed_batch(self._config, moment)
            else:
                assert isinstance(self._form, Pipeline)
                pipeline = pipeline_for(self._config, moment.n_frozen) or self._form
                wanted = pipeline.ending(self._config, moment)
                if self._search is not None:
                    wanted = self._search.begin(wanted)
        elif self._search is not None and moment.seconds > 0.0:
            assert isinstance(self._form, Pipeline)
            wanted = self._search.after_step(self._form, moment.seconds)
        self._next = self._form
        if wanted != self._form:
            self._next = self._possible(wanted)
        return None if self._next == self._form else self._next

    def _possible(self, form: Form) -> Form:
        """Return ``form``, or the present form if impossible or if a rank is not ready."""
        try:
            check(form.moved(self._config))
        except ConfigError as error:
            logger.warning("The run does not go on %s: %s", form, error)
            return self._form
        absent = self._joining.absent()
        if absent and dist.get_rank() == 0:
            logger.warning(
                "The run does not go on %s, but as before: %s not ready within %g s "
                "(freezing.elastic.join_limit_s); the next change of what is frozen tries again",
                form,
                ", ".join(absent),
                self._config.freezing.elastic.join_limit_s,
            )
        return self._form if absent else form

    def _move(self, handed: Handover, started: float) -> None:
        """Go on with a trainer of the next form, loaded from the last trainer's state."""
        self._trainer, self._output = None, handed.output  # room for the next one
        moved, scaling = self._next.moved(self._config), self._next.scaling(self._config)
        with rebuilding():
            self._trainer = self._build(moved, self._leaves, scaling, self._dims, handed.output)
        self._form = self._next
        self._trainer.take_over(handed, partial(self._tell, self._trainer, started))

    def _tell(self, trainer: HandoverTrainer, started: float) -> None:
        """Log and write a finished move."""
        seconds, step = time.perf_counter() - started, trainer.step + 1
        trainer.device_seconds += seconds * dist.get_world_size()
        layers = self._form.layers if isinstance(self._form, Pipeline) else self._form.split
        trainer.metrics_processor.record_move(step, self._n_frozen, layers, seconds)
        logger.info(
            "Frozen layers: %d; the run goes on %s, from step %d, after %.1f s",
            self._n_frozen,
            self._form,
            step,
            seconds,
        )


_VERDICT = "verdict"


class MoveBarrier:
    """A barrier before moves, which ends without late ranks, for all ranks alike.

    A timeout of a collective breaks its process group, and ranks may disagree on it. Here the first
    word in the store counts for everyone, also for late ranks.
    """

    def __init__(self, store: dist.Store, rank: int, n_ranks: int, limit_s: float) -> None:
        self._store = dist.PrefixStore("timelyfreeze/moves", store)
        self._rank, self._n_ranks = rank, n_ranks
        self._limit = timedelta(seconds=limit_s)
        self._n_moves = 0
        # A rank that is late tells nothing.
        self._store.set(f"host/{rank}", socket.gethostname())

    def absent(self) -> list[str]:
        """Wait for all ranks; return the late ranks with their hosts, the same list on all."""
        # A connection of its own: torch's watchdogs may use the other one meanwhile.
        store = self._store.clone()
        move = dist.PrefixStore(f"move/{self._n_moves}", store)
        self._n_moves += 1
        move.set(f"ready/{self._rank}", "")
        if move.add("n_ready", 1) == self._n_ranks:
            move.compare_set(_VERDICT, "", "[]")
        try:
            move.wait([_VERDICT], self._limit)
        except dist.DistStoreError:
            late = [rank for rank in range(self._n_ranks) if not move.check([f"ready/{rank}"])]
            move.compare_set(_VERDICT, "", json.dumps(late))  # unless it was said before
        late = json.loads(move.get(_VERDICT))
        return [f"rank {rank} on host {store.get(f'host/{rank}').decode()}" for rank in late]


Leaves = Callable[[RunState], object]
KnownDims = dict[tuple[int, int, int], ParallelDims]


class _MoveRequested(BaseException):
    """The run goes on elsewhere. No ``Exception``, never reported as an error on the way."""


@dataclass(frozen=True)
class Handover:
    """State of a run for another trainer."""

    memory: MemoryCheckpoint  # what a checkpoint would hold
    heard: int  # a signal to stop that came late, or 0
    phase: Phase | None  # of the last step; None if there was none since the run was resumed
    output: RunRecorder  # what the run is shown and recorded by


class HandoverTrainer(Trainer):
    """The first base of a trainer of a part of a run, before ``FreezingTrainer``.

    ``leaves`` returns before each step, on all ranks alike, the run's next form, None to stay.
    ``dims`` are former trainers' dimensions by degrees, ``output`` is the run's so far, ``told``
    its configuration where ``job_config`` is a part's.
    """

    checkpointer: SafeCheckpointManager
    job_config: JobConfig
    metrics_processor: FreezingMetricsProcessor
    left_with: RunRecorder | None = None  # once it has left

    def __init__(
        self,
        job_config: JobConfig,
        leaves: Leaves,
        scaling: BatchScaling,
        dims: KnownDims,
        output: RunRecorder | None = None,
        told: JobConfig | None = None,
    ) -> None:
        self._leaves, self._scaling, self._known_dims = leaves, scaling, dims
        self.told = told
        self._step_seconds = 0.0
        self._arrived: Callable[[], None] = lambda: None
        self._until_arrived = ExitStack()
        self.output = output
        super().__init__(job_config)
        if self.controller is not None:
            self.controller.moves = told is None
        # A pipeline is never longer than the first, whose last ranks are shown.
        has_loss = not self.parallel_dims.pp_enabled or self.pp_has_last_stage
        assert output is None or not output.run.is_shown or has_loss

    @property
    def stop(self) -> Any:
        """The request to stop, with the signals heard."""
        return self._stop

    def init_distributed(self) -> ParallelDims:
        """Return dimensions, with the meshes of a former trainer of the same degrees.

        Meshes of the same ranks and names are equal, and torch's caches would go on with the first
        meshes' process groups.
        """
        found = super().init_distributed()
        if self.output is not None:
            quiet_unless(self.output.run.is_shown, dist.get_rank())
        return self._known_dims.setdefault((found.pp, found.dp_replicate, found.dp_shard), found)

    def should_continue_training(self) -> bool:
        """Return whether there is another step; leave if another trainer has the step."""
        self._until_arrived.close()
        arrived, self._arrived = self._arrived, lambda: None
        arrived()
        goes_on = super().should_continue_training()
        if goes_on:
            n_frozen = 0 if self.controller is None else self.controller.settled_front
            # Larger steps take the schedule further, which checkpoints hold.
            n_batches = self.lr_schedulers.schedulers[0].last_epoch
            moment = RunState(n_frozen, self.step, n_batches, self._step_seconds)
            if self._leaves(moment) is not None:
                raise _MoveRequested
        return goes_on

    def train(self) -> None:
        """Train to the end of the run, or until another trainer takes over."""
        try:
            with self._until_arrived:
                super().train()
        except _MoveRequested:
            self.left_with = self.metrics_processor.leave()

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        """Run an optimizer step at this trainer's scaling."""
        started = time.perf_counter()
        with self._rate_scaled():
            super().train_step(data_iterator)
        if self.job_config.freezing.elastic.search_microbatches and self.device.type != "cpu":
            titan_tools.device_module.synchronize()
        self._step_seconds = time.perf_counter() - started
        for _ in range(1, self._scaling.growth):
            self.lr_schedulers.step()

    @contextmanager
    def _rate_scaled(self) -> Iterator[None]:
        """Take the schedule's learning rate times a factor, until the schedule sets the next."""
        factor = self._scaling.rate_factor_of(self.step)
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

    def hand_over(self) -> Handover:
        """Close; return the run's state."""
        assert self.left_with is not None
        config, controller = self.job_config, self.controller
        scale = config.lora.scale if config.freezing.method == LORA else None
        memory = self.checkpointer.hand_over(self.device, scale)
        if controller is not None and controller.cache is not None:
            controller.cache.store.hand_over()
        self.close()
        phase = None if controller is None else controller.entered_phase
        return Handover(memory, self._stop.heard, phase, self.left_with)

    def take_over(self, handed: Handover, arrived: Callable[[], None]) -> None:
        """Resume another trainer's state; call ``arrived`` once loaded."""
        self.checkpointer.take_over(handed.memory)
        if self.controller is not None:
            self.controller.entered_phase = handed.phase
        self._stop.heard = handed.heard
        self._arrived = arrived
        self._until_arrived.enter_context(silence(logging.INFO))


@contextmanager
def rebuilding() -> Iterator[None]:
    """Build a trainer inside, in the room of the last one; all was said at the start."""
    gc.collect()
    if titan_tools.device_type != "cpu":
        titan_tools.device_module.empty_cache()
    with silence(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def silence(level: int) -> Iterator[None]:
    """Keep messages up to ``level`` out of the log."""
    before = logging.root.manager.disable
    logging.disable(max(before, level))
    try:
        yield
    finally:
        logging.disable(before)
