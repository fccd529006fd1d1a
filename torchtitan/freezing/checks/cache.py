"""Finds errors in ``[freezing.cache]``: what keeps a frozen front's output from coming again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from timelyfreeze.control.caching import in_use
from timelyfreeze.files import write_obstacle
from timelyfreeze.policies import NONE, makes_plan
from torchtitan.data.rows.kinds import INSTRUCT_DATASETS, is_instruct_dataset
from torchtitan.freezing.config import JobConfig, cache_folder

_ENABLED = "freezing.cache.enable is true"
# What would cut a row in parts.
_ALONE = ("tensor_parallel_degree", "context_parallel_degree")


def caches(config: JobConfig) -> bool:
    """Return whether outputs of a frozen front are to be kept; not where nothing is frozen."""
    return config.freezing.cache.enable and config.freezing.method != NONE


def cache_errors(config: JobConfig) -> Iterator[str]:
    """Yield why outputs of the frozen front cannot be kept, or not as asked."""
    if not caches(config):
        return
    yield from config.freezing.cache.errors()
    yield from _method_errors(config)
    yield from _data_errors(config)
    for name in _ALONE:
        if (degree := getattr(config.parallelism, name)) > 1:
            yield f"{_ENABLED}, and parallelism.{name} is {degree}; it must be 1"
    if config.model.name != "llama3":
        yield (
            f"{_ENABLED}, and model.name is {config.model.name!r}; only the blocks of llama3 are "
            "known to compute a row from nothing but its tokens"
        )


def _method_errors(config: JobConfig) -> Iterator[str]:
    if makes_plan(config.freezing.method):
        yield (
            f"{_ENABLED}, and freezing.method is {config.freezing.method!r}, whose plan freezes "
            "other tensors in each microbatch; it must be a policy without a plan"
        )


def _data_errors(config: JobConfig) -> Iterator[str]:
    dataset = config.training.dataset
    if not is_instruct_dataset(dataset):
        yield (
            f"{_ENABLED}, and training.dataset is {dataset!r}, whose rows have no names; it must "
            f"be one of {', '.join(INSTRUCT_DATASETS)}"
        )
    elif config.data.packing:
        yield (
            f"{_ENABLED}, and data.packing is true, with which each epoch has other sequences; it "
            "must be false"
        )


def cache_folder_errors(config: JobConfig) -> Iterator[str]:
    """Say why this process can keep no rows in the folder of the cache."""
    settings = config.freezing.cache
    if not (caches(config) and settings.disk_gib > 0.0):
        return
    folder = Path(cache_folder(config))
    if obstacle := write_obstacle(folder):
        yield f"freezing.cache.folder is {settings.folder!r}, and {obstacle}; name another folder"
    elif in_use(folder, int(os.environ.get("RANK", "0"))):
        yield (
            f"freezing.cache.folder is {settings.folder!r}, which another run uses; name another "
            "folder"
        )
