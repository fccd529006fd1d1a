"""AutoFreeze's packing in a run: the batch for a frozen front, and the run with it."""

import time
from dataclasses import dataclass, replace

import torch.distributed as dist
from torchtitan.tools.logging import logger

from timelyfreeze.cli.torchrun import Restart, present_restart
from timelyfreeze.front.plan import BatchPacking, last_step, min_max_balance, performance_packing
from torchtitan.freezing.elastic.part import Leave, TrainerPart
from torchtitan.freezing.elastic.pipeline import (
    BatchScaling,
    Pipeline,
    RunState,
    ending_with,
    first_pipeline,
)
from torchtitan.freezing.memory.estimate import CutMemory
from torchtitan.freezing.partition.cut import part_parameters
from torchtitan.settings import JobConfig, global_rows, modules_of_split, with_values

# Time of a forward, over that of a forward and its backward: all that a frozen layer takes.
_FROZEN_COST = 1 / 3
_Split = tuple[int, ...]


@dataclass(frozen=True)
class PackedBatch:
    """How large batches are, how the model is cut for them, and when the run ends."""

    packing: BatchPacking  # a worker's batch and a step, over those of the start
    rows: int  # rows of a step
    split: _Split  # layers of each stage
    last_step: int

    def __str__(self) -> str:
        """Return the batch in words."""
        packing, layers = self.packing, ",".join(map(str, self.split))
        return (
            f"with microbatches {packing.factor} times as large as at the start, "
            f"{packing.accumulations} batches and {self.rows} rows in a step, {layers} layers on "
            f"the ranks, up to step {self.last_step}"
        )

    def moved(self, config: JobConfig) -> JobConfig:
        """Return the configuration of a moved run begun with ``config``.

        The number of microbatches stays, and so does the schedule of the learning rate.
        """
        factor, size = self.packing.factor, config.parallelism.pipeline_parallel_microbatch_size
        values = {
            "parallelism.module_fqns_per_model_part": modules_of_split(self.split),
            "parallelism.pipeline_parallel_microbatch_size": factor * size,
            "training.local_batch_size": factor * config.training.local_batch_size,
            "training.global_batch_size": self.rows,
        }
        return ending_with(with_values(config, values), self.last_step)

    def scaling(self, config: JobConfig) -> BatchScaling:
        """Return the scaling of steps, relative to a run begun with ``config``."""
        growth = self.packing.growth
        return BatchScaling(growth, config.freezing.packing.rate_factor(growth))


def first_batch(config: JobConfig) -> PackedBatch:
    """Return a run's first batch."""
    rows = global_rows(config)
    packing = BatchPacking(1, rows // config.training.local_batch_size)
    return PackedBatch(packing, rows, first_pipeline(config).split, config.training.steps)


def packed_batch(config: JobConfig, moment: RunState) -> PackedBatch:
    """Return the batch for a run, begun with ``config``, at a moment.

    The largest batch with a cut where no rank needs more memory than the fullest at the start; of
    such cuts the fastest slowest rank wins.
    """
    start = first_batch(config)
    max_growth = max(1, config.freezing.packing.max_global_batch // start.rows)
    packing, splits = start.packing, {1: start.split}
    if moment.n_frozen:
        limit = CutMemory(config, sum(start.split)).of_fullest(start.split)

        def fits(factor: int) -> bool:
            larger = replace(start, packing=BatchPacking(factor, 1)).moved(config)
            split = _split(larger, start.split, moment.n_frozen, limit)
            if split is not None:
                splits[factor] = split
            return split is not None

        packing = performance_packing(fits, packing.accumulations, max_growth)
    end = start.last_step
    if max_growth > 1:
        end = last_step(end, moment.step, moment.n_batches, packing.growth)
    return PackedBatch(packing, packing.growth * start.rows, splits[packing.factor], end)


def fewest_ranks(config: JobConfig, n_frozen: int) -> Pipeline:
    """Return the shortest pipeline with room for a model with ``n_frozen`` frozen front layers.

    No rank may need more memory than the fullest at the start, with the longest pipeline.
    """
    start = first_pipeline(config)
    if not n_frozen:
        return start
    n_layers = sum(start.split)
    limit = CutMemory(config, n_layers).of_fullest(start.split)
    for n_ranks in range(2, start.n_ranks):
        any_cut = Pipeline((n_layers - n_ranks + 1, *[1] * (n_ranks - 1)))
        found = _split(any_cut.moved(config), any_cut.split, n_frozen, limit)
        if found is not None:
            return Pipeline(found)
    return start


def _split(config: JobConfig, start: _Split, n_frozen: int, limit: int) -> _Split | None:
    """Return the fastest cut of a run with at most ``limit`` bytes on all ranks."""
    n_layers, parts = sum(start), part_parameters(config)
    memory = CutMemory(config, n_layers)
    # Looking up tokens takes no time worth mentioning.
    costs = [n * (_FROZEN_COST if i < n_frozen else 1.0) for i, n in enumerate(parts.layers)]
    costs[-1] += parts.last

    def has_room(rank: int, first: int, stop: int) -> bool:
        return memory.of_rank(rank, first, stop, n_frozen).total <= limit

    found = min_max_balance(costs, len(start), has_room)
    return None if found is None else found[0]


class GivingBack(TrainerPart):
    """The end of a run, with a checkpoint, before a step with another number of ranks."""

    def __init__(self, job_config: JobConfig) -> None:
        self._former = present_restart()
        self._first, self._start = first_pipeline(job_config), job_config
        self._n_ranks = self._first.n_ranks
        if self._former is not None:
            self._first = Pipeline(tuple(self._former.first_split))
            self._start = self._first.moved(job_config)
        self._n_frozen: int | None = None
        self._next: Restart | None = None

    def begin(self) -> None:
        """Count the time since the last step of the part before, for processes that stay."""
        if (former := self._former) is not None:
            self.trainer.device_seconds += former.n_former * (time.time() - former.left_at)

    def before_step(self) -> Leave | None:
        """Leave if the next step is for another number of ranks."""
        n_frozen = self.trainer.controller.checks.settled_front
        if n_frozen == self._n_frozen:
            return None
        self._n_frozen = n_frozen
        found = fewest_ranks(self._start, n_frozen)
        if found.n_ranks == self._n_ranks:
            return None
        self._next = Restart(found.split, self._first.split, self._n_ranks, time.time())
        return Leave(why=f"{n_frozen} layers are frozen, and the run goes on {found}")

    def end(self) -> None:
        """Tell the launcher how other processes take over."""
        if self._next is None:
            return
        if dist.get_rank() == 0:
            self._next.leave()
        logger.info(
            "Frozen layers: %d; the run goes on %s instead of %d, from the checkpoint of step %d",
            self._n_frozen,
            Pipeline(tuple(self._next.split)),
            self._next.n_former,
            self.trainer.step,
        )


def present_config(job_config: JobConfig) -> JobConfig:
    """Return the configuration of this part of a run, from the first part's."""
    part = present_restart()
    return job_config if part is None else Pipeline(tuple(part.split)).moved(job_config)
