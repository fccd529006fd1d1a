"""``timelyfreeze export`` of every model, image classifiers beside LLaMA."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torchtitan.freezing.config import IMAGE_MODELS
from torchtitan.hf import export as hf_export
from torchtitan.hf.export import Exportable, require_tensors, with_dtype
from torchtitan.hf.flavors import LLAMA, chosen_args
from torchtitan.hf.weights import FolderForm, StoredWeights
from torchtitan.images.settings import PREPROCESSOR
from torchtitan.vision.adapter import VisionAdapter, places_in_folder
from torchtitan.vision.library import vision_flavors

_HEAD = "output.weight"


def vision_form(exportable: Exportable, weights: StoredWeights) -> FolderForm:
    """Return the form of an image classifier, with the classes that it was trained for."""
    job_config = exportable.job_config
    require_tensors(exportable, weights, [_HEAD])
    try:
        args = chosen_args(job_config, vision_flavors(job_config))
        args = replace(args, classes=len(weights.empty(_HEAD)))
        config = args.config()
    except (ImportError, ValueError) as error:
        raise ValueError(str(error)) from error
    config.architectures = [args.model_class]
    names = list(places_in_folder(args))
    require_tensors(exportable, weights, names)

    def settings(folder: Path, dtype: torch.dtype | None) -> dict[str, Any]:
        for place in exportable.places:
            if (place / PREPROCESSOR).is_file():
                shutil.copyfile(place / PREPROCESSOR, folder / PREPROCESSOR)
        return with_dtype(json.loads(config.to_json_string()), dtype or weights.dtype(_HEAD))

    return FolderForm(names, VisionAdapter(args, None).to_hf, settings)


FORMS: hf_export.Forms = {LLAMA: hf_export.llama_form, **dict.fromkeys(IMAGE_MODELS, vision_form)}
