"""Which configurations the profile covers, told before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from timelyfreeze.runtime import known_schedules
from timelyfreeze.settings import unknown_words
from torchtitan.freezing.config import JobConfig

_OTHER_PARALLELISMS = (
    "tensor_parallel_degree",
    "context_parallel_degree",
    "expert_parallel_degree",
    "data_parallel_shard_degree",
    "data_parallel_replicate_degree",
)


# Microbatches of all ranks, up to which an order is built in moments.
_MOST_CELLS = 65536


def size_errors(config: JobConfig) -> Iterator[str]:
    """Say which sizes of a configuration make no pipeline, or none that anyone could run."""
    parallelism, training = config.parallelism, config.training
    n_ranks, size = (
        parallelism.pipeline_parallel_degree,
        parallelism.pipeline_parallel_microbatch_size,
    )
    if n_ranks < 1:
        yield f"parallelism.pipeline_parallel_degree is {n_ranks}; it must be 1 or more"
    for name in ("seq_len", "local_batch_size"):
        if getattr(training, name) < 1:
            yield f"training.{name} is {getattr(training, name)}; it must be 1 or more"
    if n_ranks <= 1 or training.local_batch_size < 1:
        return
    if size < 1 or training.local_batch_size % size:
        yield (
            f"training.local_batch_size is {training.local_batch_size}, which "
            f"parallelism.pipeline_parallel_microbatch_size ({size}) must divide"
        )
    elif n_ranks * training.local_batch_size // size > _MOST_CELLS:
        yield (
            f"parallelism.pipeline_parallel_degree ({n_ranks}) times microbatches "
            f"({training.local_batch_size // size}, from training.local_batch_size) must be at "
            f"most {_MOST_CELLS}"
        )


def not_covered(config: JobConfig) -> Iterator[str]:
    """Say what about a configuration keeps its stages from being profiled."""
    parallelism, training = config.parallelism, config.training
    for key in _OTHER_PARALLELISMS:
        # A shard degree of -1 takes what is left, which is 1 where the pipeline has all ranks.
        if getattr(parallelism, key) > 1:
            yield (
                f"parallelism.{key} is {getattr(parallelism, key)}; a stage is profiled on one "
                "device, so it must be 1"
            )
    yield from size_errors(config)
    if parallelism.pipeline_parallel_degree < 2:
        yield (
            f"parallelism.pipeline_parallel_degree is {parallelism.pipeline_parallel_degree}; a "
            "pipeline has 2 ranks or more"
        )
    name = parallelism.pipeline_parallel_schedule
    if name.lower() not in (known.lower() for known in known_schedules()):
        yield (
            f"parallelism.pipeline_parallel_schedule is {name!r}; known: "
            f"{', '.join(known_schedules())}"
        )
    if config.compile.enable and "model" in config.compile.components:
        yield (
            'compile.components has "model": a compiled block has one backward, from which no '
            "single tensor can be left out; set compile.enable = false"
        )
    if config.data.packing:
        yield "data.packing is true; profiled microbatches have one document a row, set it to false"
    if training.enable_cpu_offload:
        yield "training.enable_cpu_offload is true; it belongs to sharding, so it must be false"
    yield from unknown_words(first_stage=config.freezing.first_stage)


def model_not_covered(config: JobConfig, model_args: Any) -> Iterator[str]:
    """Say the same about the model that it asks for."""
    for name in ("n_layers", "dim", "vocab_size"):
        if not hasattr(model_args, name):
            yield (
                f"model.name is {config.model.name!r}, whose description has no {name}; profiled "
                "are language models of layers that are alike"
            )
    attention = getattr(model_args, "attn_type", "sdpa")
    if attention != "sdpa":
        yield (
            f"model.flavor {config.model.flavor!r} has {attention} attention, whose masks come "
            "from the data; choose a flavor with sdpa"
        )
