"""``timelyfreeze export`` of every model, image classifiers beside LLaMA."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan.freezing.config import IMAGE_MODELS, JobConfig
from torchtitan.hf import export as hf_export
from torchtitan.hf.export import copy_companions, with_dtype
from torchtitan.hf.flavors import LLAMA, chosen_args
from torchtitan.hf.weights import FolderForm, StoredWeights
from torchtitan.images.settings import PREPROCESSOR
from torchtitan.vision.adapter import VisionAdapter, places_in_folder
from torchtitan.vision.model import vision_flavors

_HEAD = "output.weight"


def vision_form(job_config: JobConfig, weights: StoredWeights) -> FolderForm:
    """Return the form of an image classifier, with the classes that it was trained for."""
    weights.require([_HEAD])
    try:
        args = chosen_args(job_config, vision_flavors(job_config))
        args = replace(args, classes=len(weights.empty(_HEAD)))
        config = args.config()
    except (ImportError, ValueError) as error:
        raise ValueError(str(error)) from error
    config.architectures = [args.model_class]
    names = list(places_in_folder(args))
    weights.require(names)

    def settings(folder: Path) -> dict[str, Any]:
        copy_companions(job_config, [PREPROCESSOR], folder)
        return with_dtype(json.loads(config.to_json_string()), weights.dtype(_HEAD))

    return FolderForm(names, VisionAdapter(args, None).to_hf, settings)


FORMS: hf_export.Forms = {LLAMA: hf_export.llama_form, **dict.fromkeys(IMAGE_MODELS, vision_form)}
