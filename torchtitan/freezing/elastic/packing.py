"""AutoFreeze's packing in a run: which batch suits what is frozen, and a run that has it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from timelyfreeze.front.plan import (
    BatchPacking,
    last_step,
    min_max_balance,
    performance_packing,
)
from torchtitan.freezing.config import JobConfig, global_rows, modules_of_split
from torchtitan.freezing.elastic.pipeline import Moment, Pace, Pipeline, ending_with, first_pipeline
from torchtitan.freezing.memory.estimate import CutMemory
from torchtitan.freezing.partition import part_parameters

# Time of a forward, over that of a forward and its backward: all that a frozen layer takes.
_FROZEN_COST = 1 / 3
_Split = tuple[int, ...]


@dataclass(frozen=True)
class PackedBatch:
    """How large batches are, how the model is cut for them, and when the run ends.

    Attributes:
        packing: A worker's batch and a step, over those of the start.
        rows: Rows of a step.
        split: Layers of each stage.
        last_step: The last step of the run.
    """

    packing: BatchPacking
    rows: int
    split: _Split
    last_step: int

    def __str__(self) -> str:
        """Return it in words."""
        packing, layers = self.packing, ",".join(map(str, self.split))
        return (
            f"with microbatches {packing.factor} times as large as at the start, "
            f"{packing.accumulations} batches and {self.rows} rows in a step, {layers} layers on "
            f"the ranks, up to step {self.last_step}"
        )

    def moved(self, config: JobConfig) -> JobConfig:
        """Return the configuration that a run goes on with that began with ``config``.

        The number of microbatches stays, and so does the schedule of the learning rate.
        """
        training, parallelism, factor = config.training, config.parallelism, self.packing.factor
        moved = replace(
            config,
            parallelism=replace(
                parallelism,
                module_fqns_per_model_part=modules_of_split(self.split),
                pipeline_parallel_microbatch_size=factor
                * parallelism.pipeline_parallel_microbatch_size,
            ),
            training=replace(
                training,
                local_batch_size=factor * training.local_batch_size,
                global_batch_size=self.rows,
            ),
        )
        return ending_with(moved, self.last_step)

    def pace(self, config: JobConfig) -> Pace:
        """Return what its steps are, of a run that began with ``config``."""
        growth = self.packing.growth
        return Pace(growth, config.freezing.packing.rate_factor(growth))


def first_batch(config: JobConfig) -> PackedBatch:
    """Return what a run begins with."""
    rows = global_rows(config)
    packing = BatchPacking(1, rows // config.training.local_batch_size)
    return PackedBatch(packing, rows, first_pipeline(config).split, config.training.steps)


def packed_batch(config: JobConfig, moment: Moment) -> PackedBatch:
    """Return the batch that suits a run at a moment.

    It is the largest for which the model can be cut so that no rank needs more memory than the
    fullest one at the start, by the estimate of ``timelyfreeze estimate``. Of such cuts it is the
    one whose slowest rank is fastest. Where no larger batch has room, the cut of the start stays.

    Args:
        config: What the run began with.
        moment: Where it is; with nothing frozen, the batch is that of the start.
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
    """Return the shortest pipeline that a model with ``n_frozen`` layers in front frozen fits in.

    No rank may need more memory than the fullest one at the start. Batches stay as they are. With
    nothing frozen, and where no shorter one will do, it is the pipeline of the start.

    Args:
        config: What the run began with.
        n_frozen: Layers.
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
    """Return the fastest cut of a run in which no rank holds more than ``limit`` bytes."""
    n_layers, parts = sum(start), part_parameters(config)
    memory = CutMemory(config, n_layers)
    # Looking up tokens takes no time worth mentioning.
    costs = [n * (_FROZEN_COST if i < n_frozen else 1.0) for i, n in enumerate(parts.layers)]
    costs[-1] += parts.last

    def has_room(rank: int, first: int, stop: int) -> bool:
        return memory.of_rank(rank, first, stop, n_frozen).total <= limit

    found = min_max_balance(costs, len(start), has_room)
    return None if found is None else found[0]
