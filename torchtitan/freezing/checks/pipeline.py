"""Finds schedules, batches and orders that make no pipeline, or none that can be emulated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import torch

from timelyfreeze.policies import freezes_by_turns
from timelyfreeze.runtime import known_schedules, splits_backward
from timelyfreeze.schedule import ActionKind, order_from_csv
from torchtitan.freezing.checks.parallel import COMPILED, NOT_COMPILED, compiles_blocks, peer_errors
from torchtitan.freezing.config import JobConfig

_CSV = "parallelism.pipeline_parallel_schedule_csv"
_OVERLAP = "parallelism.pipeline_parallel_expert_parallel_overlap"
_EMULATED = "emulation.enable is true"
# Microbatches of all ranks, up to which an order is built in moments.
_MAX_CELLS = 65536


_ONE_STAGE_SCHEDULES = ("GPipe", "1F1B")


def pipeline_errors(config: JobConfig) -> Iterator[str]:
    """Yield what is wrong with the pipeline that is asked for: key, value and rule."""
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_degree <= 1:
        return
    yield from schedule_errors(config)
    yield from _microbatch_errors(config)
    name = parallelism.pipeline_parallel_schedule
    if name.lower() == "dualpipev" and parallelism.pipeline_parallel_expert_parallel_overlap:
        yield from _overlap_errors(config)
    if is_known(name) and order_splits_backward(config):
        if parallelism.fsdp_reshard_after_forward == "always":
            yield (
                'parallelism.fsdp_reshard_after_forward is "always"; torch then loses gradients '
                f'of a backward that is split, as {name} does, so it must be "default" or "never"'
            )
        if compiles_blocks(config):
            yield (
                f"{COMPILED}: the backward of a compiled block cannot be split, as {name} does; "
                f"set {NOT_COMPILED}"
            )
    if parallelism.pipeline_parallel_schedule_csv:
        yield from _csv_errors(config, Path(parallelism.pipeline_parallel_schedule_csv))


def schedule_errors(config: JobConfig) -> Iterator[str]:
    """Say that the schedule has a name which torch does not know."""
    name = config.parallelism.pipeline_parallel_schedule
    if not is_known(name):
        yield (
            f"parallelism.pipeline_parallel_schedule is {name!r}; "
            f"known: {', '.join(known_schedules())}"
        )


def one_stage_errors(config: JobConfig, on: str) -> Iterator[str]:
    """Say that the ranks of a pipeline have several stages each, which ``on`` cannot be with."""
    name = config.parallelism.pipeline_parallel_schedule
    csv = config.parallelism.pipeline_parallel_schedule_csv
    if csv or name not in _ONE_STAGE_SCHEDULES:
        yield (
            f"{on}, and the schedule is {csv or name!r}; "
            "parallelism.pipeline_parallel_schedule must be one with a stage on each rank: "
            f"{', '.join(_ONE_STAGE_SCHEDULES)}"
        )


def size_errors(config: JobConfig) -> Iterator[str]:
    """Say which sizes of a configuration make no pipeline, or none that anyone could run."""
    parallelism, training = config.parallelism, config.training
    n_ranks = parallelism.pipeline_parallel_degree
    yield from too_small(config, "parallelism.pipeline_parallel_degree")
    yield from length_errors(config)
    if n_ranks <= 1 or training.local_batch_size < 1:
        return
    yield from _microbatch_errors(config)


def length_errors(config: JobConfig) -> Iterator[str]:
    """Say that a batch or its sequences hold nothing."""
    yield from too_small(config, "training.seq_len", "training.local_batch_size")


def too_small(config: JobConfig, *keys: str, lowest: int = 1) -> Iterator[str]:
    """Say which of the keys, "section.name", have a number below the lowest allowed."""
    for key in keys:
        value = attrgetter(key)(config)
        if value is not None and value < lowest:
            yield f"{key} is {value}; it must be {lowest} or more"


def recompute_error(config: JobConfig) -> str:
    """Return the error of a split backward in a model that recomputes layers."""
    return (
        f"activation_checkpoint.mode is {config.activation_checkpoint.mode!r}; torch cannot split "
        f"the backward of {config.parallelism.pipeline_parallel_schedule} through recomputed "
        'layers, so it must be "none"'
    )


def n_microbatches(config: JobConfig) -> int | None:
    """Return the number of microbatches of a pipeline batch; None where keys contradict."""
    size = config.parallelism.pipeline_parallel_microbatch_size
    if size < 1 or config.training.local_batch_size % size:
        return None
    return config.training.local_batch_size // size


def is_known(schedule_name: str) -> bool:
    """Return whether torch has a schedule of that name, in whatever case it is written."""
    return schedule_name.lower() in (known.lower() for known in known_schedules())


def order_splits_backward(config: JobConfig) -> bool:
    """Return whether backwards come in two halves, by the schedule's name or its CSV file."""
    csv = config.parallelism.pipeline_parallel_schedule_csv
    if not csv:
        return splits_backward(config.parallelism.pipeline_parallel_schedule)
    try:
        order = order_from_csv(Path(csv).read_text())
    except (OSError, ValueError):
        return False  # reported as an error of its own
    return any(action.kind is ActionKind.WEIGHT_BACKWARD for row in order.ranks for action in row)


def _microbatch_errors(config: JobConfig) -> Iterator[str]:
    n, n_ranks = n_microbatches(config), config.parallelism.pipeline_parallel_degree
    if n is not None and n_ranks * n > _MAX_CELLS:
        yield (
            f"parallelism.pipeline_parallel_degree ({n_ranks}) times microbatches "
            f"({n}, from training.local_batch_size) must be at most {_MAX_CELLS}"
        )
    if n is None:
        yield (
            f"training.local_batch_size is {config.training.local_batch_size}, which "
            "parallelism.pipeline_parallel_microbatch_size "
            f"({config.parallelism.pipeline_parallel_microbatch_size}) must divide"
        )


def _overlap_errors(config: JobConfig) -> Iterator[str]:
    if not torch.accelerator.is_available():
        yield (
            f"{_OVERLAP} is true; overlapping DualPipeV needs an accelerator's streams, so set it "
            "to false on a CPU"
        )
    elif freezes_by_turns(config.freezing.method):
        yield (
            f"{_OVERLAP} is true; actions that overlap cannot be timed one by one, so "
            f"freezing.method {config.freezing.method!r} needs it to be false"
        )
    elif config.emulation.enable:
        yield f"{_OVERLAP} is true; an emulation runs actions one by one, so it must be false"


def _csv_errors(config: JobConfig, path: Path) -> Iterator[str]:
    key = f"{_CSV} is {str(path)!r}"
    if not os.path.isfile(path):
        yield f"{key}, which is not a file"
        return
    try:
        order = order_from_csv(path.read_text())
    except (OSError, ValueError) as error:
        yield f"{key}: {error}"
        return
    degree = config.parallelism.pipeline_parallel_degree
    if order.n_ranks != degree:
        yield (
            f"{key}, which has {order.n_ranks} ranks; it needs "
            f"parallelism.pipeline_parallel_degree ({degree})"
        )
    if (n := n_microbatches(config)) is not None and order.n_microbatches != n:
        yield (
            f"{key}, which has {order.n_microbatches} microbatches; it needs "
            f"training.local_batch_size / parallelism.pipeline_parallel_microbatch_size ({n})"
        )
    if any(rank != stage % order.n_ranks for stage, rank in enumerate(order.stage_to_rank)):
        yield (
            f"{key}, whose stages lie on ranks {list(order.stage_to_rank)}; "
            f"upstream places stage s of a CSV schedule on rank s modulo {order.n_ranks}"
        )


def emulation_errors(config: JobConfig) -> Iterator[str]:
    """Yield what is wrong with ``[emulation]``: key, value and rule."""
    if not config.emulation.enable:
        return
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_degree < 2:
        yield (
            f"{_EMULATED} and parallelism.pipeline_parallel_degree is "
            f"{parallelism.pipeline_parallel_degree}; there is no pipeline to emulate, so set it "
            "to the number of ranks, 2 or more"
        )
    yield from peer_errors(config, f"{_EMULATED} and a process has no peers")
    if (n_processes := int(os.environ.get("WORLD_SIZE", "1"))) != 1:
        yield (
            f"{_EMULATED} and {n_processes} processes were started; all ranks of the pipeline run "
            "in one, so start it with NGPU=1"
        )
    if config.comm.mode != "default":
        yield (
            f"{_EMULATED} and comm.mode is {config.comm.mode!r}, which pretends to have ranks in "
            'another way; it must be "default"'
        )
