"""Pipelines of an elastic run: which one suits what is frozen, and how a run goes on in it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from timelyfreeze.planning.elastic import elastic_plan
from torchtitan.freezing.config import (
    JobConfig,
    count_layers,
    examples_of_microbatch,
    global_rows,
    modules_of_split,
    stage_modules,
)
from torchtitan.freezing.elastic.form import Pace
from torchtitan.freezing.partition import count_model_layers, part_parameters


@dataclass(frozen=True)
class Pipeline:
    """How a run's processes share the model.

    Attributes:
        split: Layers of each stage; a stage for each pipeline rank.
        n_replicas: Copies of the pipeline, for each one that the run began with.
    """

    split: tuple[int, ...]
    n_replicas: int = 1

    @property
    def n_ranks(self) -> int:
        """Of one copy."""
        return len(self.split)

    def __str__(self) -> str:
        """Return it in words."""
        layers = ",".join(map(str, self.split))
        copies = "" if self.n_replicas == 1 else f", {self.n_replicas} of them side by side"
        return f"in a pipeline of {self.n_ranks} ranks with {layers} layers{copies}"

    def moved(self, config: JobConfig) -> JobConfig:
        """Return the configuration that a run goes on with that began with ``config``.

        The global batch and the examples of a microbatch stay as they are: each replica has fewer
        microbatches. New replicas share the parameters (FSDP). In an emulation they take turns, a
        batch each, and their gradients add up.
        """
        n, parallelism = self.n_replicas, config.parallelism
        shards = parallelism.data_parallel_shard_degree  # -1: as many as there are ranks for
        training, validation = config.training, config.validation
        rows, n_validated = training.global_batch_size, validation.steps
        if config.emulation.enable:
            shards, rows = -1, global_rows(config)
            n_validated *= n if n_validated > 0 else 1  # -1: all there are
        return replace(
            config,
            parallelism=replace(
                parallelism,
                pipeline_parallel_degree=self.n_ranks,
                module_fqns_per_model_part=modules_of_split(self.split),
                data_parallel_shard_degree=shards if shards < 0 else shards * n,
            ),
            training=replace(
                training,
                local_batch_size=training.local_batch_size // n,
                global_batch_size=rows,
            ),
            validation=replace(
                validation,
                local_batch_size=validation.local_batch_size // n,
                steps=n_validated,
            ),
        )

    def pace(self, config: JobConfig) -> Pace:
        """Return that steps stay as they are."""
        return Pace()


def first_pipeline(config: JobConfig) -> Pipeline:
    """Return what a run begins with."""
    return Pipeline(count_layers(stage_modules(config, count_model_layers(config))))


def pipeline_for(config: JobConfig, n_frozen: int) -> Pipeline | None:
    """Return the pipeline that suits a model whose first ``n_frozen`` layers are frozen.

    That of PipeTransformer's Algorithm 1 (``timelyfreeze.planning.elastic``), by numbers of
    parameters: shorter as long as its largest rank gets no larger than at the start, and with
    replicas on all ranks that this frees. Where replicas cannot share the microbatches so that
    each has one for every stage, it stays longer.

    Args:
        config: What the run began with.
        n_frozen: With nothing or everything frozen, it is the pipeline of the start.

    Returns:
        None if no cut of the model suits: the algorithm may leave a rank without layers.
    """
    start, settings = first_pipeline(config), config.freezing.elastic
    n_layers, n_ranks = sum(start.split), len(start.split)
    if not 0 < n_frozen < n_layers:
        return start
    sizes = part_parameters(config).units
    n_microbatches = config.training.local_batch_size // examples_of_microbatch(config)
    least = settings.min_ranks
    while True:
        try:
            plan = elastic_plan(
                sizes,
                n_frozen,
                n_ranks,
                settings.frozen_cost,
                _largest(sizes, start.split),
                n_microbatches=n_microbatches,
                min_ranks=least,
            )
        except ValueError:  # of all that it refuses, only this can be: the rest was checked
            return None
        if plan.ranks_used == n_ranks and plan.n_microbatches >= plan.n_ranks:
            return Pipeline(plan.split, plan.n_replicas)
        least = plan.n_ranks + 1


def _largest(sizes: list[int], split: tuple[int, ...]) -> int:
    ends = [sum(split[: stage + 1]) for stage in range(len(split))]
    return max(sum(sizes[end - n : end]) for n, end in zip(split, ends, strict=True))
