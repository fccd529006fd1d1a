"""Parameters and bytes of the parts of a model, counted without memory."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

import torch
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.protocols.train_spec import TrainSpec

from timelyfreeze.whatif.loads import ModelSizes, PartParameters
from torchtitan.freezing.config import JobConfig
from torchtitan.freezing.memory.estimate import model_bytes
from torchtitan.hf.flavors import chosen_args
from torchtitan.vision.args import VisionArgs
from torchtitan.vision.spec import base_spec, with_classes


def model_sizes(job_config: JobConfig) -> ModelSizes:
    """Return what can be told of the sizes of a run's model."""
    parameters = memory = None
    with suppress(ValueError):
        parameters = part_parameters(job_config)
    with suppress(ValueError):
        memory = model_bytes(job_config)
    return ModelSizes(parameters, memory)


def count_model_layers(job_config: JobConfig) -> int:
    """Return the number of layers of a run's model.

    Raises:
        ValueError: If upstream does not cut the model by layers, or does not know it.
    """
    _, args = _described(job_config)
    n_layers: int = args.n_layers
    return n_layers


def part_parameters(job_config: JobConfig) -> PartParameters:
    """Count the parameters of a run's model on the meta device.

    Raises:
        ValueError: As ``count_model_layers``, or if the classes of its pictures cannot be told.
    """
    spec, args = _described(job_config)
    args.update_from_config(job_config)
    with torch.device("meta"):
        model = spec.model_cls(args)
    layers = tuple(sum(p.numel() for p in layer.parameters()) for layer in model.layers.values())
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
    args = chosen_args(job_config, spec.model_args)
    return spec, with_classes(args, job_config) if isinstance(args, VisionArgs) else args
