"""Finds numbers and folders with which nothing can be done about a frozen front."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from timelyfreeze.files import write_obstacle
from timelyfreeze.front.caching import in_use
from timelyfreeze.policies import freezes_by_turns
from torchtitan.freezing.checks.pipeline import n_microbatches
from torchtitan.freezing.config import JobConfig, cache_folder, global_rows


def caches(config: JobConfig) -> bool:
    """Return whether outputs of a frozen front are to be kept; not where nothing is frozen."""
    return config.freezing.cache.enable and freezes_by_turns(config.freezing.method)


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


def front_errors(config: JobConfig) -> Iterator[str]:
    """Yield which numbers and words make no sense for a front that is frozen."""
    freezing = config.freezing
    if not freezes_by_turns(freezing.method):
        return
    for section in (freezing.cache, freezing.elastic):
        if section.enable:
            yield from section.errors()
    if freezing.elastic.enable or (freezing.packing.is_on and not freezing.packing.gives_back):
        yield from _late_errors(config)
    if freezing.packing.is_on:
        yield from freezing.packing.errors()
        yield from _batch_errors(config)


def _batch_errors(config: JobConfig) -> Iterator[str]:
    most = config.freezing.packing.max_global_batch
    if n_microbatches(config) is None or config.training.local_batch_size < 1:
        return  # told with the pipeline
    rows = global_rows(config)
    if 0 < most < rows:
        yield (
            f"freezing.packing.max_global_batch is {most}; it must be 0, or at least "
            f"training.global_batch_size ({rows})"
        )


def _late_errors(config: JobConfig) -> Iterator[str]:
    """Yield why a move could not be given up: messages from before it would be, first."""
    limit_s, timeout_s = config.freezing.elastic.join_limit_s, config.comm.init_timeout_seconds
    if not 0.0 < limit_s < timeout_s:
        yield (
            f"freezing.elastic.join_limit_s is {limit_s}; it must be above 0 and below "
            f"comm.init_timeout_seconds ({timeout_s}), after which ranks fail that wait for another"
        )
