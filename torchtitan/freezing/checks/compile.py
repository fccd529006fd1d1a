"""Finds what compiled blocks cannot be combined with, before a process group starts."""

from __future__ import annotations

from collections.abc import Iterator

from timelyfreeze.policies import freezes_whole_layers, parse_method
from torchtitan.freezing.config import JobConfig

_ON = 'compile.components has "model"'
_OFF = 'compile.enable = false or components = ["loss"]'


def compiles_blocks(config: JobConfig) -> bool:
    """Return whether the blocks of the model are compiled, each with a single backward."""
    return config.compile.enable and "model" in config.compile.components


def split_error(schedule_name: str) -> str:
    """Return what is wrong with compiled blocks under a schedule that splits backwards."""
    return (
        f"{_ON}: the backward of a compiled block cannot be split, as {schedule_name} does; set "
        f"{_OFF}"
    )


def tensor_parallel_errors(config: JobConfig) -> Iterator[str]:
    """Say that compiled blocks of split tensors fail in their first backward."""
    degree = config.parallelism.tensor_parallel_degree
    if compiles_blocks(config) and degree > 1:
        yield (
            f"parallelism.tensor_parallel_degree is {degree} and {_ON}; this torch fails in the "
            f"backward of a compiled block whose tensors are split, so set {_OFF}"
        )


def policy_errors(config: JobConfig) -> Iterator[str]:
    """Say that a method freezes parts of blocks that are compiled."""
    name = config.freezing.method
    method = parse_method(name)
    policy = None if method is None else method.policy
    if compiles_blocks(config) and policy is not None and not freezes_whole_layers(policy):
        yield (
            f"{_ON}: a compiled block has one backward, from which no single tensor can be left "
            f"out, as {policy} does; freezing.method {name!r} needs {_OFF}"
        )


def measuring_errors(config: JobConfig) -> Iterator[str]:
    """Say that batches would be measured in which blocks are still being compiled."""
    method = parse_method(config.freezing.method)
    plans = method is not None and method.plans
    if compiles_blocks(config) and plans and config.freezing.discard_batches == 0:
        yield (
            f"freezing.discard_batches is 0 and {_ON}; the first batches of a phase compile and must "
            "not be measured, so it must be 1 or more"
        )
