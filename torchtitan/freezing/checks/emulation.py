"""Finds what contradicts a pipeline in one process before the process group starts."""

from __future__ import annotations

import os
from collections.abc import Iterator

from torchtitan.freezing.config import JobConfig

_ON = "emulation.enable is true"


def emulation_errors(config: JobConfig) -> Iterator[str]:
    """Yield what is wrong with ``[emulation]``: key, value and rule."""
    if not config.emulation.enable:
        return
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_degree < 2:
        yield (
            f"{_ON} and parallelism.pipeline_parallel_degree is "
            f"{parallelism.pipeline_parallel_degree}; there is no pipeline to emulate, so set it "
            "to the number of ranks, 2 or more"
        )
    for name in (
        "data_parallel_replicate_degree",
        "context_parallel_degree",
        "tensor_parallel_degree",
        "expert_parallel_degree",
        "expert_tensor_parallel_degree",
    ):
        if (degree := getattr(parallelism, name)) != 1:
            yield f"{_ON} and parallelism.{name} is {degree}; a process has no peers: it must be 1"
    if parallelism.data_parallel_shard_degree not in (-1, 1):
        yield (
            f"{_ON} and parallelism.data_parallel_shard_degree is "
            f"{parallelism.data_parallel_shard_degree}; a process has no peers: it must be 1 or -1"
        )
    if (n_processes := int(os.environ.get("WORLD_SIZE", "1"))) != 1:
        yield (
            f"{_ON} and {n_processes} processes were started; all ranks of the pipeline run in "
            "one, so start it with NGPU=1"
        )
    if config.comm.mode != "default":
        yield (
            f"{_ON} and comm.mode is {config.comm.mode!r}, which pretends to have ranks in another "
            'way; it must be "default"'
        )
