"""The cut of ``parallelism.partition``, computed when a configuration is read.

All ranks get the same cut, from configuration, profile and schedule alone.
"""

import inspect
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.protocols.train_spec import TrainSpec

from timelyfreeze.policies import freezes_by_turns
from timelyfreeze.schedule import ScheduleOrder
from timelyfreeze.whatif.bounds_file import PipelineMetadata, read_bounds_file
from timelyfreeze.whatif.fronts import layer_times
from timelyfreeze.whatif.grid import render_split
from timelyfreeze.whatif.layer_model import BlockTimes, LayerModel
from timelyfreeze.whatif.partition import (
    MEMORY,
    PARAMETERS,
    TIME,
    Load,
    PartParameters,
    memory_load,
    min_max_split,
    parameter_load,
    time_load,
)
from torchtitan.freezing.memory.estimate import described, model_bytes
from torchtitan.freezing.partition.sublayers import sublayer_sizes
from torchtitan.freezing.values.rules import size_errors
from torchtitan.settings import (
    JobConfig,
    count_layers,
    modules_of_split,
    pipeline_order,
    stage_modules,
    with_values,
)
from torchtitan.vision.spec import base_spec

# How loads are told: what they are, in which unit, and how much of it one is.
_UNITS = {
    TIME: ("forward and backward", "ms", 1e6),
    PARAMETERS: ("parameters", "million", 1e6),
    MEMORY: ("memory", "GiB", 1024**3),
}


def with_partition(job_config: JobConfig) -> JobConfig:
    """Return a configuration cut by its partition; a ValueError if impossible."""
    parallelism = job_config.parallelism
    if not parallelism.partition:
        return job_config
    if reasons := [*size_errors(job_config)]:
        raise ValueError("; ".join(reasons))
    # A file's cut that the command line puts aside need not suit this many stages.
    less = "parallelism.pipeline_parallel_{}_stage_less_layers"
    job_config = with_values(job_config, {less.format("first"): 0, less.format("last"): 0})
    n_layers = count_model_layers(job_config)
    order = pipeline_order(job_config, n_layers)
    split = min_max_split(n_layers, _load(job_config, parallelism.partition, order, n_layers))
    cut = {"parallelism.module_fqns_per_model_part": modules_of_split(split)}
    return with_values(job_config, cut)


def live_layer_times(job_config: JobConfig, n_frozen: int) -> list[float]:
    """Return the layers' times in a microbatch by the run's profile, as ``layer_times``."""
    model = _profiled_layers(job_config, count_model_layers(job_config))
    if not isinstance(model, LayerModel):
        raise ValueError(
            "freezing.elastic.partition is 'time', and the layers of model.flavor "
            f"{job_config.model.flavor!r} differ; times of a front are told of layers that are "
            "alike"
        )
    return layer_times(model, n_frozen)


def check_live_times(job_config: JobConfig) -> None:
    """Refuse an elastic run by time without known times of layers or memory of ranks."""
    freezing = job_config.freezing
    if freezes_by_turns(freezing.method) and freezing.elastic.is_by_time:
        live_layer_times(job_config, 1)
        model_bytes(job_config)


def partition_line(job_config: JobConfig) -> str | None:
    """Return the log line of a partition, cut and loads; None without."""
    parallelism = job_config.parallelism
    if not parallelism.partition:
        return None
    n_layers = count_model_layers(job_config)
    order = pipeline_order(job_config, n_layers)
    split = count_layers(stage_modules(job_config, n_layers))
    told = [f"parallelism.partition = {parallelism.partition!r}: layers {render_split(split)}"]
    for partition in (TIME, PARAMETERS, MEMORY):
        if partition == TIME and not parallelism.partition_profile:
            continue
        with suppress(ValueError):  # not known of this run
            load = _load(job_config, partition, order, n_layers)
            told.append(_told(partition, load.of_split(split)))
    return "; ".join(told)


def _told(partition: str, loads: Sequence[int]) -> str:
    what, unit, one = _UNITS[partition]
    values = " ".join(f"{load / one:.4g}" for load in loads)
    over_mean = max(loads) * len(loads) / sum(loads)
    return f"{what} of each rank {values} {unit}, largest over mean {over_mean:.2f}"


def _load(job_config: JobConfig, partition: str, order: ScheduleOrder, n_layers: int) -> Load:
    if partition == TIME:
        return time_load(_profiled_layers(job_config, n_layers), order.stage_to_rank)
    if partition == PARAMETERS:
        return parameter_load(part_parameters(job_config), order.stage_to_rank)
    return memory_load(model_bytes(job_config), order)


def _profiled_layers(job_config: JobConfig, n_layers: int) -> LayerModel | BlockTimes:
    """Return the stage times of the configuration's profile."""
    name = job_config.parallelism.partition_profile
    key = f"parallelism.partition_profile is {name!r}"
    try:
        file = read_bounds_file(Path(name))
        if file.metadata.layers is None:
            raise ValueError(
                "it does not say how many layers a stage has; `timelyfreeze profile` writes one "
                "that does"
            )
        model = file.model(file.metadata.layers, part_parameters(job_config))
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    if model.n_layers != n_layers:
        raise ValueError(
            f"{key}, whose model has {model.n_layers} layers; model.flavor "
            f"{job_config.model.flavor!r} has {n_layers}"
        )
    return model


def model_sizes(job_config: JobConfig) -> PipelineMetadata:
    """Return the known sizes of a run's model."""
    parameters = memory = None
    with suppress(ValueError):
        parameters = part_parameters(job_config)
    with suppress(ValueError):
        memory = model_bytes(job_config)
    return PipelineMetadata(parameters=parameters, memory=memory)


def count_model_layers(job_config: JobConfig) -> int:
    """Return a model's number of layers; a ValueError if upstream cuts otherwise."""
    return int(_described(job_config)[1].n_layers)


def part_parameters(job_config: JobConfig, *, sublayers: bool = False) -> PartParameters:
    """Count the parameters of a run's model on the meta device.

    With ``sublayers`` attention and MLP of a block are layers of their own.
    """
    spec, args = _described(job_config)
    with torch.device("meta"):
        model = spec.model_cls(args)
    layers = tuple(sum(p.numel() for p in layer.parameters()) for layer in model.layers.values())
    if sublayers:
        blocks, kind = model.layers.values(), job_config.model.name
        layers = tuple(n for block in blocks for n in sublayer_sizes(kind, block))
    first = sum(p.numel() for p in model.tok_embeddings.parameters())
    total = sum(p.numel() for p in model.parameters())
    return PartParameters(first, layers, total - first - sum(layers))


def _described(job_config: JobConfig) -> tuple[TrainSpec, Any]:
    """Return upstream's spec of a model, and its description."""
    name = job_config.model.name
    try:
        spec = base_spec(job_config)
    except (ImportError, ValueError) as error:
        raise ValueError(f"model.name is {name!r}: {error}") from error
    if spec.pipelining_fn is None or inspect.unwrap(spec.pipelining_fn) is not pipeline_llm:
        raise ValueError(
            f"model.name is {name!r}, whose layers cannot be counted; a partition needs a model "
            "that upstream cuts by layers"
        )
    return spec, described(job_config)
