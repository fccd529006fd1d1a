"""Finds degrees of parallelism, compiled blocks and float8 that cannot be combined.

Upstream asserts most of it once all processes have met, and some only when the model is built.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from math import prod

import torch
from torchtitan.tools.utils import has_cuda_capability

from torchtitan.freezing.config import JobConfig

COMPILED = 'compile.components has "model"'
NOT_COMPILED = 'compile.enable = false or components = ["loss"]'
LINEAR = "quantize.linear.float8"
GROUPED = "quantize.grouped_mm.float8"

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
    tensors, contexts = degrees["tensor_parallel_degree"], degrees["context_parallel_degree"]
    if contexts > 1 and not torch.accelerator.is_available():
        yield (
            f"parallelism.context_parallel_degree is {contexts}; torch has attention over several "
            "processes for accelerators only, so it must be 1 on a CPU"
        )
    if compiles_blocks(config) and tensors > 1:
        yield (
            f"parallelism.tensor_parallel_degree is {tensors} and {COMPILED}; this torch fails in "
            f"the backward of a compiled block whose tensors are split, so set {NOT_COMPILED}"
        )
    n_processes = _n_processes(config)
    if n_processes is not None:
        yield from _count_errors(degrees, shard, n_processes)
        shard = n_processes // prod(degrees.values()) if shard == -1 else shard
    replicas = degrees["data_parallel_replicate_degree"]
    is_pipeline = degrees["pipeline_parallel_degree"] > 1
    if is_pipeline and replicas > 1 and shard == 1 and contexts == 1:
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


def split_layers(config: JobConfig) -> Iterator[str]:
    """Say which parallelism gives a rank a part only of what a layer computes."""
    for key in ("tensor_parallel_degree", "context_parallel_degree"):
        if (degree := getattr(config.parallelism, key)) > 1:
            yield f"parallelism.{key} is {degree}"


def peer_errors(config: JobConfig, why: str) -> Iterator[str]:
    """Say which parallelism there is besides that of the pipeline, and why it cannot be."""
    for key in (*_DEGREES[1:], _SHARD, "expert_parallel_degree", "expert_tensor_parallel_degree"):
        # A shard degree of -1 takes what is left, which is 1 where the pipeline has all ranks.
        allowed = (1, -1) if key == _SHARD else (1,)
        if (degree := getattr(config.parallelism, key)) not in allowed:
            numbers = " or ".join(map(str, allowed))
            yield f"parallelism.{key} is {degree}; {why}, so it must be {numbers}"


def lone_pipeline_errors(config: JobConfig, why: str) -> Iterator[str]:
    """Say which parallelism there is besides one pipeline, replicas that -1 makes included."""
    yield from peer_errors(config, why)
    parallelism, n_replicas = config.parallelism, data_parallel_degree(config)
    if parallelism.data_parallel_shard_degree == -1 and n_replicas is not None and n_replicas > 1:
        yield (
            f"parallelism.{_SHARD} is -1, and the processes started make {n_replicas} of it; "
            f"{why}, so start as many as parallelism.pipeline_parallel_degree "
            f"({parallelism.pipeline_parallel_degree})"
        )


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


def compiles_blocks(config: JobConfig) -> bool:
    """Return whether the blocks of the model are compiled, each with a single backward."""
    return config.compile.enable and "model" in config.compile.components


def float8_errors(config: JobConfig) -> Iterator[str]:
    """Yield what is wrong with the float8 converters of ``model.converters``."""
    converters = config.model.converters
    asked = [name for name in (LINEAR, GROUPED) if name in converters]
    if asked and importlib.util.find_spec("torchao") is None:
        yield f"model.converters has {asked[0]!r}, which needs the package torchao; install it"
    if LINEAR in converters and not has_cuda_capability(8, 9):
        if not config.quantize.linear.float8.emulate:
            yield (
                f"model.converters has {LINEAR!r}, which needs a GPU of compute capability 8.9 or "
                f"more; elsewhere set {LINEAR}.emulate = true, to try it slowly"
            )
        elif compiles_blocks(config):
            yield (
                f"{LINEAR}.emulate is true and {COMPILED}; without a GPU of compute capability "
                f"8.9 float8 is emulated in eager blocks only, so set {NOT_COMPILED}"
            )
    degree = config.parallelism.pipeline_parallel_degree
    if GROUPED in converters and degree > 1:
        yield (
            f"model.converters has {GROUPED!r} and parallelism.pipeline_parallel_degree is "
            f"{degree}; upstream has it for a single stage only, so remove it"
        )
