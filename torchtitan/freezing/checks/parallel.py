"""Finds degrees of parallelism that upstream cannot combine before a process group starts.

Upstream asserts most of them once all processes have met, and one only when the model is built.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod

import torch

from torchtitan.freezing.checks.compile import tensor_parallel_errors
from torchtitan.freezing.config import JobConfig

_DEGREES = (
    "pipeline_parallel_degree",
    "data_parallel_replicate_degree",
    "context_parallel_degree",
    "tensor_parallel_degree",
)
_SHARD = "data_parallel_shard_degree"


def parallel_errors(config: JobConfig) -> Iterator[str]:
    """Yield which degrees of ``[parallelism]`` do not go together: key, value and rule."""
    parallelism = config.parallelism
    degrees = {name: getattr(parallelism, name) for name in _DEGREES}
    shard = parallelism.data_parallel_shard_degree
    wrong = [
        f"parallelism.{name} is {n}; it must be 1 or more" for name, n in degrees.items() if n < 1
    ]
    if shard < 1 and shard != -1:
        wrong.append(f"parallelism.{_SHARD} is {shard}; it must be 1 or more, or -1 for the rest")
    yield from wrong
    if wrong:
        return
    divisor = degrees["tensor_parallel_degree"]
    if degrees["context_parallel_degree"] > 1:
        divisor *= 2 * degrees["context_parallel_degree"]
    if config.training.seq_len % divisor:
        yield (
            f"training.seq_len is {config.training.seq_len}; tensor and context parallelism cut "
            f"sequences, so it must be a multiple of {divisor}"
        )
    if (degree := degrees["context_parallel_degree"]) > 1 and not torch.accelerator.is_available():
        yield (
            f"parallelism.context_parallel_degree is {degree}; torch has attention over several "
            "processes for accelerators only, so it must be 1 on a CPU"
        )
    yield from tensor_parallel_errors(config)
    n_processes = _n_processes(config)
    if n_processes is not None:
        yield from _count_errors(degrees, shard, n_processes)
        shard = n_processes // prod(degrees.values()) if shard == -1 else shard
    is_pipeline = degrees["pipeline_parallel_degree"] > 1
    replicas = degrees["data_parallel_replicate_degree"]
    if is_pipeline and replicas > 1 and shard == 1 and degrees["context_parallel_degree"] == 1:
        yield (
            f"parallelism.data_parallel_replicate_degree is {replicas} and {_SHARD} is 1; upstream "
            "replicates a pipeline's stages only where they are sharded too: shard them over "
            f"{replicas} instead, or over 2 or more besides"
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


def _count_errors(degrees: dict[str, int], shard: int, n_processes: int) -> Iterator[str]:
    product = prod(degrees.values())
    names = " x ".join(f"{name} ({n})" for name, n in degrees.items() if n > 1) or "1"
    if shard == -1 and (n_processes % product or n_processes < product):
        yield (
            f"{n_processes} processes were started; they must be a multiple of parallelism's "
            f"{names} = {product}; set NGPU (or nodes) or these degrees"
        )
    elif shard != -1 and n_processes != product * shard:
        yield (
            f"{n_processes} processes were started; parallelism needs {names} x {_SHARD} ({shard}) "
            f"= {product * shard}; set NGPU (or nodes) or these degrees"
        )


def _n_processes(config: JobConfig) -> int | None:
    """Return how many processes torchrun has started; None where nothing has, or it pretends."""
    text = os.environ.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() and config.comm.mode == "default" else None
