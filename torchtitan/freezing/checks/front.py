"""Finds what keeps a frozen front from being read (``[freezing.cache]``) or from working ahead."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from timelyfreeze.cli.torchrun import NEXT
from timelyfreeze.files import write_obstacle
from timelyfreeze.front.caching import in_use
from timelyfreeze.policies import PLANNED, freezes_by_turns, makes_plan
from timelyfreeze.settings import skips_input_grads
from torchtitan.data.rows.messages import INSTRUCT_DATASETS, is_instruct_dataset
from torchtitan.freezing.checks.pipeline import (
    COMPILED,
    NOT_COMPILED,
    compiles_blocks,
    lone_pipeline_errors,
    n_microbatches,
    one_stage_errors,
    split_layers,
)
from torchtitan.freezing.config import JobConfig, cache_folder, global_rows

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


_ENABLED = "freezing.elastic.enable is true"
_ALONE = ("tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree")


def elastic_errors(config: JobConfig) -> Iterator[str]:
    """Yield why a run cannot go on in another pipeline; nothing where nothing is frozen."""
    freezing, parallelism = config.freezing, config.parallelism
    if not freezing.elastic.enable or not freezes_by_turns(freezing.method):
        return
    yield from freezing.elastic.errors()
    yield from _late_errors(config)
    if freezing.method == PLANNED:
        yield (
            f"{_ENABLED}, and freezing.method is {freezing.method!r}, which has no policy that "
            "freezes a front; it must be a policy, or 'timelyfreeze+' and one"
        )
    elif makes_plan(freezing.method) and isinstance(freezing.max_freeze_ratio, list):
        yield (
            f"{_ENABLED}, and freezing.max_freeze_ratio is {freezing.max_freeze_ratio}, one for "
            "each stage of one pipeline; it must be one value"
        )
    yield from one_stage_errors(config, _ENABLED)  # so a shorter pipeline has as many as ranks
    for degree in _ALONE:
        if (value := getattr(parallelism, degree)) > 1:
            yield f"{_ENABLED}, and parallelism.{degree} is {value}; it must be 1"
    if freezing.elastic.is_by_time:
        yield from _kept_errors(config, "freezing.elastic.partition is 'time'")
    if freezing.elastic.searches:
        yield from _search_errors(config)
    dataset = config.training.dataset
    if not is_instruct_dataset(dataset):
        yield (
            f"{_ENABLED}, and training.dataset is {dataset!r}, whose rows cannot be dealt to more "
            f"replicas; it must be one of {', '.join(INSTRUCT_DATASETS)}"
        )
    if config.model.name != "llama3":
        yield (
            f"{_ENABLED}, and model.name is {config.model.name!r}, whose layers cannot be counted; "
            "it must be 'llama3'"
        )


def _search_errors(config: JobConfig) -> Iterator[str]:
    on = "freezing.elastic.search_microbatches is true"
    if config.emulation.enable:
        yield (
            f"{on}, and emulation.enable is true: times by the virtual clock are known too late; "
            "switch one of them off"
        )
    if makes_plan(config.freezing.method):
        yield (
            f"{on}, and freezing.method is {config.freezing.method!r}, which would plan anew for "
            "each number that is tried; it must be a policy without a plan"
        )


def packing_errors(config: JobConfig) -> Iterator[str]:
    """Yield why a run cannot use the memory that it frees; nothing where nothing is frozen."""
    freezing, settings = config.freezing, config.freezing.packing
    if not settings.is_on or not freezes_by_turns(freezing.method):
        return
    yield from settings.errors()
    on = f"freezing.packing.mode is {settings.mode!r}"
    if makes_plan(freezing.method):
        yield (
            f"{on}, and freezing.method is {freezing.method!r}, whose plan is of one size of "
            "microbatches; it must be a policy without a plan"
        )
    yield from _kept_errors(config, on)
    yield from one_stage_errors(config, on)
    for section in ("elastic", "cache"):
        if getattr(freezing, section).enable:
            yield f"{on}, and freezing.{section}.enable is true; switch one of them off"
    if config.emulation.enable:
        yield f"{on}, and emulation.enable is true: one device holds all ranks"
    yield from _estimate_errors(config, on)
    yield from _batch_errors(config, on)
    yield from _restart_errors(config, on) if settings.gives_back else _late_errors(config)


def _estimate_errors(config: JobConfig, on: str) -> Iterator[str]:
    """Yield why nobody can tell how much memory larger batches take."""
    why = f"{on}, and memory is estimated for pipeline parallelism alone"
    yield from lone_pipeline_errors(config, why)
    if config.model.name != "llama3":
        yield f"{on}, and model.name is {config.model.name!r}; memory is estimated for 'llama3'"
    if (mode := config.activation_checkpoint.mode) not in ("none", "full"):
        yield (
            f"{on}, and activation_checkpoint.mode is {mode!r}; memory is estimated for "
            '"none" and "full"'
        )


def _kept_errors(config: JobConfig, on: str) -> Iterator[str]:
    """Yield why a frozen front would free no memory."""
    freezing = config.freezing
    if not skips_input_grads(freezing.first_stage, freezing.skip_input_grads):
        yield (
            f"{on}, and a frozen front keeps its activations with freezing.first_stage "
            f"{freezing.first_stage!r} and skip_input_grads {freezing.skip_input_grads!r}; they "
            'must be "all_or_nothing" and "use"'
        )
    if compiles_blocks(config):
        yield (
            f"{on}, and {COMPILED}: compiled blocks keep their activations, frozen or not; set "
            f"{NOT_COMPILED}"
        )


def _batch_errors(config: JobConfig, on: str) -> Iterator[str]:
    training, most = config.training, config.freezing.packing.max_global_batch
    if not is_instruct_dataset(training.dataset):
        yield (
            f"{on}, and training.dataset is {training.dataset!r}; batches grow of "
            f"{', '.join(INSTRUCT_DATASETS)}"
        )
    if n_microbatches(config) is None or training.local_batch_size < 1:
        return  # told with the pipeline
    rows = global_rows(config)
    if 0 < most < rows:
        yield (
            f"freezing.packing.max_global_batch is {most}; it must be 0, or at least "
            f"training.global_batch_size ({rows})"
        )


def _restart_errors(config: JobConfig, on: str) -> Iterator[str]:
    """Yield why a run could not go on with fewer processes."""
    needed = {"enable": True, "load_only": False, "load_step": -1, "exclude_from_loading": []}
    for key, value in needed.items():
        if (found := getattr(config.checkpoint, key)) != value:
            yield (
                f"{on}, and checkpoint.{key} is {json.dumps(found)}; fewer processes go on from "
                f"all of the last checkpoint, so it must be {json.dumps(value)}"
            )
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    if (n_nodes := int(os.environ.get("GROUP_WORLD_SIZE", "1"))) > 1:
        yield f"{on}, and the run has {n_nodes} nodes, which cannot be given back; start it on one"
    elif NEXT not in os.environ:
        yield (
            f"{on}, and the run was started by torchrun alone, which would not start it again with "
            "fewer processes; start it by `timelyfreeze train` or run_train.sh"
        )


def _late_errors(config: JobConfig) -> Iterator[str]:
    """Yield why a move could not be given up: messages from before it would be, first."""
    limit_s, timeout_s = config.freezing.elastic.join_limit_s, config.comm.init_timeout_seconds
    if not 0.0 < limit_s < timeout_s:
        yield (
            f"freezing.elastic.join_limit_s is {limit_s}; it must be above 0 and below "
            f"comm.init_timeout_seconds ({timeout_s}), after which ranks fail that wait for another"
        )
