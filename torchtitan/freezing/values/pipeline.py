"""Finds impossible pipelines: schedules, batches and orders, also for emulation."""

import os
from collections.abc import Collection, Iterator
from math import prod
from pathlib import Path

from timelyfreeze.policies import freezes_by_turns
from timelyfreeze.schedule import (
    MAX_CELLS,
    SCHEDULES,
    ActionKind,
    build_dag,
    order_from_csv,
    splits_backward,
    stages_per_rank,
)
from timelyfreeze.whatif.partition import PARTITIONS, TIME
from torchtitan.settings import JobConfig, has_pipeline

_CSV = "parallelism.pipeline_parallel_schedule_csv"


def pipeline_errors(config: JobConfig) -> Iterator[str]:
    """Yield errors of the pipeline: key, value and rule."""
    parallelism = config.parallelism
    name, n_ranks = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree
    if n_ranks <= 1:
        return
    if stages_per_rank(name) is None:
        yield f"parallelism.pipeline_parallel_schedule is {name!r}; known: {', '.join(SCHEDULES)}"
    n = n_microbatches(config)
    if n is None:
        yield (
            f"training.local_batch_size is {config.training.local_batch_size}, which "
            "parallelism.pipeline_parallel_microbatch_size "
            f"({parallelism.pipeline_parallel_microbatch_size}) must divide"
        )
    elif n_ranks * n > MAX_CELLS:
        yield (
            f"parallelism.pipeline_parallel_degree ({n_ranks}) times microbatches "
            f"({n}, from training.local_batch_size) must be at most {MAX_CELLS}"
        )
    if parallelism.pipeline_parallel_schedule_csv:
        yield from _csv_errors(config, Path(parallelism.pipeline_parallel_schedule_csv), n)


def n_microbatches(config: JobConfig) -> int | None:
    """Return the number of microbatches of a pipeline batch; None where keys contradict."""
    size = config.parallelism.pipeline_parallel_microbatch_size
    if size < 1 or config.training.local_batch_size % size:
        return None
    return config.training.local_batch_size // size


def splits_backwards(config: JobConfig) -> bool:
    """Return whether backwards come in two halves; not where the schedule or its file is wrong."""
    name = config.parallelism.pipeline_parallel_schedule
    csv = config.parallelism.pipeline_parallel_schedule_csv
    if stages_per_rank(name) is None:
        return False
    if not csv:
        return splits_backward(name)
    try:
        order = order_from_csv(Path(csv).read_text())
    except (OSError, ValueError):
        return False
    return any(action.kind is ActionKind.WEIGHT_BACKWARD for row in order.ranks for action in row)


def _csv_errors(config: JobConfig, path: Path, n: int | None) -> Iterator[str]:
    key = f"{_CSV} is {str(path)!r}"
    if not os.path.isfile(path):
        yield f"{key}, which is not a file"
        return
    try:
        order = order_from_csv(path.read_text())
        build_dag(order)  # refuses one that would hang
    except (OSError, ValueError) as error:
        yield f"{key}: {error}"
        return
    degree = config.parallelism.pipeline_parallel_degree
    batch = "training.local_batch_size / parallelism.pipeline_parallel_microbatch_size"
    for has, what, needs, needed in (
        (order.n_ranks, "ranks", degree, "parallelism.pipeline_parallel_degree"),
        (order.n_microbatches, "microbatches", n, batch),
    ):
        if needs is not None and has != needs:
            yield f"{key}, which has {has} {what}; it needs {needed} ({needs})"
    if any(rank != stage % order.n_ranks for stage, rank in enumerate(order.stage_to_rank)):
        yield (
            f"{key}, whose stages lie on ranks {list(order.stage_to_rank)}; "
            f"upstream places stage s of a CSV schedule on rank s modulo {order.n_ranks}"
        )


_KEY = "parallelism.partition"
_NEEDS_PROFILE = (
    "needs parallelism.partition_profile: a bounds.json that `timelyfreeze profile` or a training "
    "run has written"
)
# Other ways to say where a model is cut.
_CUTS = (
    "parallelism.module_fqns_per_model_part",
    "parallelism.pipeline_parallel_first_stage_less_layers",
    "parallelism.pipeline_parallel_last_stage_less_layers",
    "parallelism.pipeline_parallel_layers_per_stage",
)


def partition_errors(config: JobConfig, given: Collection[str] = ()) -> Iterator[str]:
    """Yield errors of the partition; ``given`` are the keys in a file just read."""
    partition, degree = config.parallelism.partition, config.parallelism.pipeline_parallel_degree
    profile, freezing = config.parallelism.partition_profile, config.freezing
    if freezes_by_turns(freezing.method) and freezing.elastic.is_by_time and not profile:
        yield f"freezing.elastic.partition is {TIME!r}, which {_NEEDS_PROFILE}"
    if not partition:
        return
    if partition not in PARTITIONS:
        yield f"{_KEY} is {partition!r}; known: {', '.join(PARTITIONS)}"
        return
    if not has_pipeline(config):
        yield (
            f"{_KEY} is {partition!r}, which needs parallelism.pipeline_parallel_degree of 2 or "
            f"more; it is {degree}"
        )
    if partition == TIME and not profile:
        yield f"{_KEY} is {partition!r}, which {_NEEDS_PROFILE}"
    for key in _CUTS:
        if key in given:
            yield (
                f"{key} is given, and {_KEY} is {partition!r}, which says where to cut; remove one "
                "of the two"
            )


_DEGREES = (
    "pipeline_parallel_degree",
    "data_parallel_replicate_degree",
    "context_parallel_degree",
    "tensor_parallel_degree",
)
_SHARD = "data_parallel_shard_degree"


def parallel_errors(config: JobConfig) -> Iterator[str]:
    """Yield contradicting degrees of ``[parallelism]``: key, value and rule."""
    degrees = {name: getattr(config.parallelism, name) for name in (*_DEGREES, _SHARD)}
    takes_rest, n_processes = degrees[_SHARD] == -1, _n_processes(config)
    if takes_rest:
        del degrees[_SHARD]
    product = prod(degrees.values())
    if n_processes is not None and (
        n_processes % product if takes_rest else n_processes != product
    ):
        names = " x ".join(f"{name} ({n})" for name, n in degrees.items() if n > 1) or "1"
        yield (
            f"{n_processes} processes were started; parallelism needs "
            f"{'a multiple of ' if takes_rest else ''}{names} = {product}; set NGPU (or nodes) or "
            "these degrees"
        )
    replicas = degrees["data_parallel_replicate_degree"]
    is_pipeline = (
        degrees["pipeline_parallel_degree"] > 1 and degrees["context_parallel_degree"] == 1
    )
    if is_pipeline and replicas > 1 and data_parallel_degree(config) == replicas:
        yield (
            f"parallelism.data_parallel_replicate_degree is {replicas} and {_SHARD} is 1; upstream "
            "replicates a pipeline's stages only where they are sharded too: shard them over "
            f"{replicas} instead, or over 2 or more besides"
        )


def batch_errors(config: JobConfig) -> Iterator[str]:
    """Yield contradicting sizes of batches and sequences, and steps."""
    training, parallelism = config.training, config.parallelism
    degree = data_parallel_degree(config)
    rows = training.local_batch_size * (degree or 1)
    if training.global_batch_size > 0 and training.global_batch_size % rows:
        yield (
            f"training.global_batch_size is {training.global_batch_size}; it must be a multiple of "
            f"training.local_batch_size ({training.local_batch_size})"
            + (f" times the {degree} data-parallel ranks" if degree not in (None, 1) else "")
        )
    divisor = 2 * parallelism.tensor_parallel_degree * parallelism.context_parallel_degree
    if training.seq_len % divisor:
        yield (
            f"training.seq_len is {training.seq_len}; it must be a multiple of {divisor}: upstream "
            "wants 2 x parallelism.tensor_parallel_degree x context_parallel_degree"
        )
    total = config.lr_scheduler.total_steps
    if total is not None and total < training.steps:
        yield (
            f"lr_scheduler.total_steps is {total}; after that the learning rate would be below 0, "
            f"so it must be training.steps ({training.steps}) or more"
        )


def data_parallel_degree(config: JobConfig) -> int | None:
    """Return how many data-parallel ranks a run has; None where nothing was started yet."""
    if config.emulation.enable:
        return 1
    parallelism = config.parallelism
    others = prod(getattr(parallelism, name) for name in _DEGREES)
    shard: int | None = parallelism.data_parallel_shard_degree
    if shard == -1:
        n_processes = _n_processes(config)
        shard = None if n_processes is None else n_processes // others
    return None if shard is None else parallelism.data_parallel_replicate_degree * shard


def _n_processes(config: JobConfig) -> int | None:
    """Return the number of processes under torchrun; None without, or with pretended processes."""
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() and config.comm.mode == "default" else None


def compiles_blocks(config: JobConfig) -> bool:
    """Return whether the blocks of the model are compiled, with a single backward each."""
    return config.compile.enable and "model" in config.compile.components
