"""Pipelines of an elastic run: the choice for a frozen front, and the configuration then."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from torchtitan.tools.logging import logger

from timelyfreeze.front.plan import elastic_plan, last_step, replicas_of
from timelyfreeze.front.plan.plan import Fits
from torchtitan.freezing.memory.estimate import CutMemory
from torchtitan.freezing.partition.cut import count_model_layers, live_layer_times, part_parameters
from torchtitan.settings import (
    JobConfig,
    count_layers,
    count_sublayers,
    examples_of_microbatch,
    global_rows,
    layers_of_split,
    modules_of_split,
    stage_modules,
    with_values,
)


@dataclass(frozen=True)
class Pipeline:
    """How a run's processes share the model."""

    split: tuple[int, ...]  # units of each stage; a stage for each pipeline rank
    n_replicas: int = 1  # copies of the pipeline, for each one that the run began with
    # the last step of a run in which each replica has as many rows in a step as the pipeline of the
    # start; None where replicas share its rows
    last_step: int | None = None
    microbatch: int | None = None  # examples of a microbatch; None for as many as at the start
    sublayers: bool = False  # whether attentions and MLPs are units, instead of layers

    @property
    def layers(self) -> tuple[float, ...]:
        """Layers of each stage, an attention or an MLP for half of one."""
        return tuple(n / 2 for n in self.split) if self.sublayers else self.split

    @property
    def n_ranks(self) -> int:
        """Of a single copy."""
        return len(self.split)

    def __str__(self) -> str:
        """Return the pipeline in words."""
        layers = ",".join(f"{n:g}" for n in self.layers)
        copies = "" if self.n_replicas == 1 else f", {self.n_replicas} of them side by side"
        size = "" if self.microbatch is None else f", with microbatches of {self.microbatch}"
        end = "" if self.last_step is None else f", up to step {self.last_step}"
        if self.n_ranks == 1:
            return f"with the whole model on each rank{copies}{size}{end}"
        return f"in a pipeline of {self.n_ranks} ranks with {layers} layers{copies}{size}{end}"

    def moved(self, config: JobConfig) -> JobConfig:
        """Return the configuration of a moved run begun with ``config``.

        The examples of a microbatch stay as they are, unless others are tried. The global batch
        stays too, so that replicas have fewer microbatches; or a replica's microbatches stay, and
        the global batch grows. New replicas share the parameters (FSDP). In an emulation they take
        turns by batch, and their gradients add up.
        """
        n = self.n_replicas
        shards = config.parallelism.data_parallel_shard_degree  # -1: as many as there are ranks for
        training, validation = config.training, config.validation
        rows, n_validated = training.global_batch_size, validation.steps
        if config.emulation.enable:
            shards, rows = -1, global_rows(config)
            n_validated *= n if n_validated > 0 else 1  # -1: all there are
        batch = training.local_batch_size
        if self.last_step is None:
            batch //= n
        elif rows > 0:  # -1: a batch of each replica
            rows *= n
        values = {
            "parallelism.pipeline_parallel_degree": self.n_ranks,
            "parallelism.module_fqns_per_model_part": modules_of_split(
                self.split, sublayers=self.sublayers
            ),
            "parallelism.data_parallel_shard_degree": shards if shards < 0 else shards * n,
            "training.local_batch_size": batch,
            "training.global_batch_size": rows,
            "validation.local_batch_size": validation.local_batch_size // n,
            "validation.steps": n_validated,
        }
        if self.microbatch is not None:
            values["parallelism.pipeline_parallel_microbatch_size"] = self.microbatch
        moved = with_values(config, values)
        return moved if self.last_step is None else ending_with(moved, self.last_step)

    def scaling(self, config: JobConfig) -> BatchScaling:
        """Return the scaling of steps, relative to a run begun with ``config``."""
        return BatchScaling() if self.last_step is None else BatchScaling(self.n_replicas)

    def ending(self, config: JobConfig, moment: RunState) -> Pipeline:
        """Return the pipeline with the last step of a run at a moment."""
        if not config.freezing.elastic.rows_grow:
            return self
        n_steps, at = config.training.steps, moment
        return replace(self, last_step=last_step(n_steps, at.step, at.n_batches, self.n_replicas))


def first_pipeline(config: JobConfig) -> Pipeline:
    """Return a run's first pipeline."""
    stages = stage_modules(config, count_model_layers(config))
    is_finer = config.freezing.elastic.cuts_blocks
    split = count_sublayers(stages) if is_finer else count_layers(stages)
    start = Pipeline(split, sublayers=is_finer)
    return start.ending(config, RunState(0, step=0, n_batches=0))


def pipeline_for(config: JobConfig, n_frozen: int) -> Pipeline | None:
    """Return the pipeline for a model with ``n_frozen`` frozen front layers.

    By PipeTransformer's Algorithm 1 (``timelyfreeze.front.plan``): shorter while the largest rank
    gets no larger than at the start, by parameters or by the memory estimate, and with replicas on
    all freed ranks. Longer where replicas would lack a microbatch per stage. The first pipeline
    with nothing or everything frozen. None without a cut: the algorithm may leave a rank without
    layers.
    """
    start, settings = first_pipeline(config), config.freezing.elastic
    n_units, n_ranks, sublayers = sum(start.split), len(start.split), start.sublayers
    n_frozen *= 2 if sublayers else 1
    if not 0 < n_frozen < n_units:
        return start
    sizes: Sequence[float] = part_parameters(config, sublayers=sublayers).units
    fits = None
    if settings.is_by_time:
        sizes, fits = live_layer_times(config, n_frozen), _room(config, start.split, n_frozen)
    n_microbatches = config.training.local_batch_size // examples_of_microbatch(config)
    if settings.rows_grow:
        n_microbatches *= n_ranks  # each replica has as many, however many there are
    least = settings.min_ranks
    while True:
        try:
            plan = elastic_plan(
                sizes,
                n_frozen,
                n_ranks,
                settings.frozen_cost,
                max(sum(sizes[i] for i in layers) for layers in layers_of_split(start.split)),
                n_microbatches=n_microbatches,
                min_ranks=least,
                partition=settings.partition,
                fits=fits,
            )
        except ValueError:  # of all that it refuses, only this can be: the rest was checked
            return None
        if plan.n_ranks * plan.n_replicas == n_ranks and plan.n_microbatches >= plan.n_ranks:
            return Pipeline(plan.split, plan.n_replicas, sublayers=sublayers)
        least = plan.n_ranks + 1


def _room(config: JobConfig, start: tuple[int, ...], n_frozen: int) -> Fits:
    """Return the room of ranks: the largest need at the start."""
    n_layers, training = sum(start), config.training
    limit = CutMemory(config, n_layers).of_fullest(start)
    n_microbatches = training.local_batch_size // examples_of_microbatch(config)

    @cache
    def memory(n_ranks: int) -> CutMemory:
        n_replicas = 1  # that share a batch
        if not config.freezing.elastic.rows_grow:
            n_replicas = replicas_of(len(start), n_ranks, n_microbatches)
        of_one = {
            "parallelism.pipeline_parallel_degree": n_ranks,
            "parallelism.module_fqns_per_model_part": modules_of_split((1,) * n_ranks),
            "training.local_batch_size": training.local_batch_size // n_replicas,
        }
        return CutMemory(with_values(config, of_one), n_layers)

    def fits(n_ranks: int, rank: int, first: int, stop: int) -> bool:
        return memory(n_ranks).of_rank(rank, first, stop, n_frozen).total <= limit

    return fits


@dataclass(frozen=True)
class RunState:
    """Where a run is."""

    n_frozen: int  # layers in front that are frozen
    step: int  # that was finished last
    n_batches: int  # rows that were read until then, in steps of the start


# Steps of a new optimizer up to its full rate. Adam's first steps are as long as can be, whatever
# the gradients' noise; with 3 all weights went on from merged adapters without a rise of the loss.
_N_WARMED = 3


@dataclass(frozen=True)
class BatchScaling:
    """Size of a step, relative to the start."""

    growth: int = 1  # rows; the schedule of the learning rate goes on by as many steps
    rate_factor: float = 1.0  # of the learning rate
    rate_begins: int | None = None  # step behind which the learning rate is warmed up

    def rate_factor_of(self, step: int) -> float:
        """Return the factor of the learning rate in a step."""
        if self.rate_begins is None:
            return self.rate_factor
        return min(1.0, (step - self.rate_begins) / _N_WARMED)


def ending_with(config: JobConfig, last_step: int) -> JobConfig:
    """Return a run ending with another step; the schedule of its learning rate stays."""
    n_steps = config.lr_scheduler.total_steps
    n_steps = config.training.steps if n_steps is None else n_steps
    ends = {"training.steps": last_step, "lr_scheduler.total_steps": n_steps}
    return with_values(config, ends)


_N_CANDIDATES = 4
_N_COUNTED = 3  # steps of a trial, besides its first


class MicrobatchSearch:
    """Tries numbers of microbatches, and keeps the fastest for each length of a pipeline.

    All ranks ask alike; ``slowest`` returns the largest of all ranks' numbers. After an abandoned
    move to a trial, steps count for the present pipeline.
    """

    def __init__(self, config: JobConfig, slowest: Callable[[float], float]) -> None:
        self._config, self._slowest = config, slowest
        self._found: dict[int, int] = {}  # microbatches, by ranks of a pipeline
        self._left: list[int] = []
        self._seconds: list[float] = []
        self._medians: dict[int, float] = {}

    def begin(self, pipeline: Pipeline) -> Pipeline:
        """Return a new pipeline with its first number of microbatches."""
        n_ranks = len(pipeline.split)
        if n_ranks in self._found:
            return self._with(pipeline, self._found[n_ranks])
        self._left = candidates(n_ranks, self._rows(pipeline))
        self._seconds, self._medians = [], {}
        return self._with(pipeline, self._left.pop(0)) if self._left else pipeline

    def after_step(self, pipeline: Pipeline, seconds: float) -> Pipeline:
        """Return the next pipeline, after a step of ``pipeline`` with its seconds here."""
        if (n_ranks := len(pipeline.split)) in self._found:
            return pipeline
        self._seconds.append(seconds)
        if len(self._seconds) <= _N_COUNTED:
            return pipeline
        size = pipeline.microbatch or examples_of_microbatch(self._config)
        median = statistics.median(self._seconds[1:])
        self._medians[self._rows(pipeline) // size] = self._slowest(median)
        self._seconds = []
        if self._left:
            return self._with(pipeline, self._left.pop(0))
        self._found[n_ranks] = best = min(self._medians, key=self._medians.__getitem__)
        tried = ", ".join(f"{1e3 * s:,.1f} ms with {n}" for n, s in self._medians.items())
        logger.info("Microbatches of %d ranks: %d, of steps of %s", n_ranks, best, tried)
        return self._with(pipeline, best)

    def _rows(self, pipeline: Pipeline) -> int:
        return pipeline.moved(self._config).training.local_batch_size

    def _with(self, pipeline: Pipeline, n_microbatches: int) -> Pipeline:
        size = self._rows(pipeline) // n_microbatches
        is_first = size == examples_of_microbatch(self._config)
        return replace(pipeline, microbatch=None if is_first else size)


def candidates(n_ranks: int, rows: int) -> list[int]:
    """Return up to 4 divisors of a batch's rows from K to 6 K, evenly taken."""
    possible = [n for n in range(n_ranks, 6 * n_ranks + 1) if rows % n == 0]
    if len(possible) <= _N_CANDIDATES:
        return possible
    last = len(possible) - 1
    return [possible[round(i * last / (_N_CANDIDATES - 1))] for i in range(_N_CANDIDATES)]
