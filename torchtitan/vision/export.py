"""``timelyfreeze export`` of every model, image classifiers beside LLaMA."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan.tools.logging import logger

from torchtitan.hf import export as hf_export
from torchtitan.hf.export import with_dtype
from torchtitan.hf.flavors import LLAMA, chosen_args
from torchtitan.hf.weights import FolderForm, StoredWeights, write_json
from torchtitan.images.settings import PREPROCESSOR, training_place, transform_of
from torchtitan.images.sources import read_images
from torchtitan.settings import IMAGE_MODELS, JobConfig
from torchtitan.vision.adapter import VisionAdapter, places_in_folder
from torchtitan.vision.model import vision_flavors

_HEAD = "output.weight"


def vision_form(job_config: JobConfig, weights: StoredWeights) -> FolderForm:
    """Return the form of an image classifier, with the classes of its training."""
    weights.require([_HEAD])
    try:
        args = chosen_args(job_config, vision_flavors(job_config))
        args = replace(args, classes=len(weights.empty(_HEAD)))
        config = args.config()
    except (ImportError, ValueError) as error:
        raise ValueError(str(error)) from error
    config.architectures = [args.model_class]
    # Those of the folder that a run began from are of its own pictures.
    names = _class_names(job_config)
    if len(names) == args.classes:
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}
    tensors = list(places_in_folder(args))
    weights.require(tensors)

    def settings(folder: Path) -> dict[str, Any]:
        write_json(folder / PREPROCESSOR, _processor(job_config))
        return with_dtype(json.loads(config.to_json_string()), weights.dtype(_HEAD))

    return FolderForm(tensors, VisionAdapter(args, None).to_hf, settings)


def _class_names(job_config: JobConfig) -> tuple[str, ...]:
    """Return the names of the trained classes; none without names in the data."""
    try:
        place = training_place(job_config)
        return read_images(place).names if place.is_local else ()
    except (FileNotFoundError, ValueError) as error:
        logger.warning(f"The classes are named as in the model's folder, if at all: {error}")
        return ()


def _processor(job_config: JobConfig) -> dict[str, Any]:
    """Return transformers' settings to read pictures as in the run's validation."""
    transform = transform_of(job_config, is_training=False)
    return {
        "image_processor_type": "BitImageProcessor",
        **dict.fromkeys(("do_convert_rgb", "do_resize", "do_center_crop"), True),
        "size": {"shortest_edge": transform.shorter_side},
        "crop_size": {"height": transform.size, "width": transform.size},
        "resample": 2,  # bilinear
        **dict.fromkeys(("do_rescale", "do_normalize"), True),
        "rescale_factor": 1 / 255,
        "image_mean": list(transform.mean),
        "image_std": list(transform.std),
    }


FORMS: hf_export.Forms = {LLAMA: hf_export.llama_form, **dict.fromkeys(IMAGE_MODELS, vision_form)}
