"""TorchTitan's train spec of an image classifier."""

from dataclasses import replace
from typing import Any

from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.llama3 import parallelize_llama
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec

from torchtitan.hf.flavors import chosen_args
from torchtitan.images.loader import build_image_dataloader
from torchtitan.images.settings import configured_classes
from torchtitan.images.validation import build_image_validator
from torchtitan.settings import JobConfig
from torchtitan.vision.adapter import VisionAdapter
from torchtitan.vision.model import (
    LIBRARIES,
    VisionArgs,
    VisionModel,
    build_image_loss,
    vision_flavors,
)


def base_spec(job_config: JobConfig) -> TrainSpec:
    """Return the spec of ``model.name``: ours for an image classifier, otherwise upstream's."""
    if job_config.model.name not in LIBRARIES:
        return get_train_spec(job_config.model.name)
    return TrainSpec(
        model_cls=VisionModel,
        model_args=vision_flavors(job_config),
        # Without tensor and context parallelism nothing in it knows what a block is made of.
        parallelize_fn=parallelize_llama,
        pipelining_fn=pipeline_llm,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=build_image_dataloader,
        build_validator_fn=build_image_validator,
        build_tokenizer_fn=None,
        build_loss_fn=build_image_loss,
        state_dict_adapter=VisionAdapter,
    )


def known_args(job_config: JobConfig) -> Any:
    """Return the description of the model; None for an error told by checks of models."""
    try:
        return chosen_args(job_config, base_spec(job_config).model_args)
    except (ImportError, ValueError):
        return None


def with_classes(model_args: VisionArgs, job_config: JobConfig) -> VisionArgs:
    """Return ``model_args`` with the number of classes of the run's pictures, or ValueError."""
    try:
        return replace(model_args, classes=configured_classes(job_config))
    except FileNotFoundError as error:
        raise ValueError(str(error)) from error
