"""Finds what keeps a frozen front from being read (``[freezing.cache]``) or from working ahead."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from timelyfreeze.control.caching import in_use
from timelyfreeze.files import write_obstacle
from timelyfreeze.policies import freezes_by_turns, makes_plan
from torchtitan.data.rows.kinds import INSTRUCT_DATASETS, is_instruct_dataset
from torchtitan.freezing.checks.parallel import lone_pipeline_errors, split_layers
from torchtitan.freezing.checks.pipeline import one_stage_errors
from torchtitan.freezing.config import JobConfig, cache_folder

_CACHES = "freezing.cache.enable is true"
_AHEAD = "freezing.run_ahead is true"


def caches(config: JobConfig) -> bool:
    """Return whether outputs of a frozen front are to be kept; not where nothing is frozen."""
    return config.freezing.cache.enable and freezes_by_turns(config.freezing.method)


def cache_errors(config: JobConfig) -> Iterator[str]:
    """Yield why outputs of the frozen front cannot be kept, or not as asked."""
    if not caches(config):
        return
    yield from config.freezing.cache.errors()
    yield from _front_errors(config, _CACHES, "whose rows have no names")
    if is_instruct_dataset(config.training.dataset) and config.data.packing:
        yield (
            f"{_CACHES}, and data.packing is true, with which each epoch has other sequences; it "
            "must be false"
        )
    for found in split_layers(config):
        yield f"{_CACHES}, and {found}; it must be 1"


def run_ahead_errors(config: JobConfig) -> Iterator[str]:
    """Yield why a front cannot work ahead; nothing where nothing is frozen."""
    freezing = config.freezing
    if not freezing.run_ahead or not freezes_by_turns(freezing.method):
        return
    yield from _front_errors(config, _AHEAD, "whose next batch cannot be looked at")
    if config.emulation.enable:
        yield f"{_AHEAD}, and emulation.enable is true: one process has nobody to be ahead of"
    # A rank that holds a live stage too has no time to be ahead.
    yield from one_stage_errors(config, _AHEAD)
    alone = f"{_AHEAD}, and a front works ahead in one pipeline alone"
    yield from lone_pipeline_errors(config, alone)
    for key in ("cache", "elastic"):
        if getattr(freezing, key).enable:
            yield (
                f"{_AHEAD}, and freezing.{key}.enable is true, which has its own use for the ranks "
                "of a frozen front; switch one of them off"
            )
    if freezing.packing.is_on:
        yield (
            f"{_AHEAD}, and freezing.packing.mode is {freezing.packing.mode!r}, by which the next "
            "batch may be larger; switch one of them off"
        )


def _front_errors(config: JobConfig, enabled: str, why_no_rows: str) -> Iterator[str]:
    """Yield why no front is frozen whole, or why its output for a row is not always the same."""
    method, dataset, model = config.freezing.method, config.training.dataset, config.model.name
    if makes_plan(method):
        yield (
            f"{enabled}, and freezing.method is {method!r}, whose plan freezes other tensors in "
            "each microbatch; it must be a policy without a plan"
        )
    if not is_instruct_dataset(dataset):
        yield (
            f"{enabled}, and training.dataset is {dataset!r}, {why_no_rows}; it must be one of "
            f"{', '.join(INSTRUCT_DATASETS)}"
        )
    if model != "llama3":
        yield (
            f"{enabled}, and model.name is {model!r}; only the blocks of llama3 are known to "
            "compute a row from nothing but its tokens and their weights"
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
