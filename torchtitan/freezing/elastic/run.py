"""A run rebuilt in another form, whenever its frozen part asks for a new form."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torchtitan.tools.logging import logger

from timelyfreeze.runtime import Exchange
from torchtitan.freezing.checks import check
from torchtitan.freezing.elastic.moving import MovingRun
from torchtitan.freezing.elastic.packing import PackedBatch, first_batch, packed_batch
from torchtitan.freezing.elastic.part import Leave
from torchtitan.freezing.elastic.pipeline import (
    MicrobatchSearch,
    Pipeline,
    RunState,
    first_pipeline,
    pipeline_for,
)
from torchtitan.freezing.values.command_line import ConfigError
from torchtitan.settings import JobConfig

# One way for a run to go on; in words, how, such as "in a pipeline of 2 ranks".
Form = Pipeline | PackedBatch


class ElasticRun(MovingRun):
    """A trainer per form of the run, for as long as the form suits."""

    def __init__(self, build: Callable[..., Any], job_config: JobConfig) -> None:
        super().__init__(build)
        self._config = job_config
        packs = job_config.freezing.packing.is_on
        self._form: Form = first_batch(job_config) if packs else first_pipeline(job_config)
        self._n_frozen = -1  # not known yet
        self._search: MicrobatchSearch | None = None
        if job_config.freezing.elastic.searches:
            self._search = MicrobatchSearch(job_config, lambda s: max(Exchange().all_gather(s)))
        self.go_on(Leave(job_config))
        self._joining = MoveBarrier(
            _get_default_store(),  # torchrun's; torch has no public name for it
            dist.get_rank(),
            dist.get_world_size(),
            job_config.freezing.elastic.join_limit_s,
        )

    def next_trainer(self) -> Leave | None:
        """Return the trainer of the run's next form, None to stay."""
        if (step := self.trainer.step) == 0:
            return None  # torch would hand over an optimizer that has made a step
        # Larger steps take the schedule further, which checkpoints hold.
        n_batches = self.trainer.lr_schedulers.schedulers[0].last_epoch
        n_frozen = self.trainer.controller.checks.settled_front
        moment, wanted = RunState(n_frozen, step, n_batches), self._form
        if n_frozen != self._n_frozen:
            self._n_frozen = n_frozen
            if self._config.freezing.packing.is_on:
                wanted = packed_batch(self._config, moment)
            else:
                assert isinstance(self._form, Pipeline)
                pipeline = pipeline_for(self._config, n_frozen) or self._form
                wanted = pipeline.ending(self._config, moment)
                if self._search is not None:
                    wanted = self._search.begin(wanted)
        elif self._search is not None and self.step_seconds > 0.0:
            assert isinstance(self._form, Pipeline)
            wanted = self._search.after_step(self._form, self.step_seconds)
        if wanted == self._form or not self._is_possible(wanted):
            return None
        self._form = wanted
        return Leave(wanted.moved(self._config), wanted.scaling(self._config))

    def _is_possible(self, form: Form) -> bool:
        """Return whether a form is possible and all ranks are ready; log what stands against it."""
        try:
            check(form.moved(self._config))
        except ConfigError as error:
            logger.warning("The run does not go on %s: %s", form, error)
            return False
        absent = self._joining.absent()
        if absent and dist.get_rank() == 0:
            logger.warning(
                "The run does not go on %s, but as before: %s not ready within %g s "
                "(freezing.elastic.join_limit_s); the next change of what is frozen tries again",
                form,
                ", ".join(absent),
                self._config.freezing.elastic.join_limit_s,
            )
        return not absent

    def arrive(self, step: int, seconds: float) -> None:
        """Log and write a finished move."""
        layers = self._form.layers if isinstance(self._form, Pipeline) else self._form.split
        self.trainer.metrics_processor.record_move(step, self._n_frozen, layers, seconds)
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
