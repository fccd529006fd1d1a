"""Image classifiers by name, or as a Hugging Face folder describes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchtitan.freezing.config import JobConfig
from torchtitan.hf.flavors import FROM_FOLDER, weights_folder
from torchtitan.hf.llama_config import read_settings
from torchtitan.vision.args import VisionArgs
from torchtitan.vision.library import CONVNEXT, LIBRARIES, VIT


def _vit(width: int, layers: int, heads: int, patch_size: int, image_size: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "patch_size": patch_size,
        "image_size": image_size,
    }


def _convnext(width: int, depths: tuple[int, ...], patch_size: int) -> dict[str, Any]:
    widths = [width * 2**i for i in range(len(depths))]
    return {"hidden_sizes": widths, "depths": list(depths), "patch_size": patch_size}


# What each flavor has in its config.json; the first of each kind is for pictures of 32 x 32.
FLAVORS: dict[str, dict[str, dict[str, Any]]] = {
    VIT: {"4M": _vit(192, 9, 3, 4, 32), "L-32": _vit(1024, 24, 16, 32, 224)},
    CONVNEXT: {"3M": _convnext(40, (2, 2, 6, 2), 2), "L": _convnext(192, (3, 3, 27, 3), 4)},
}


def vision_flavors(job_config: JobConfig) -> dict[str, VisionArgs]:
    """Return every flavor of ``model.name`` by name, "hf" only if it is asked for.

    Raises:
        ValueError: If the flavor is "hf" and its folder has no ``config.json`` of such a model.
    """
    name = job_config.model.name
    settings = dict(FLAVORS[name])
    if job_config.model.flavor == FROM_FOLDER:
        settings[FROM_FOLDER] = folder_settings(name, weights_folder(job_config))
    return {flavor: described(name, given) for flavor, given in settings.items()}


def folder_settings(kind: str, folder: Path) -> dict[str, Any]:
    """Return the ``config.json`` of a folder with a model of that kind.

    Raises:
        ValueError: If there is none.
    """
    settings = read_settings(folder)
    if (found := settings.get("model_type")) != kind:
        raise ValueError(f"{str(folder)!r} has a model of type {found!r}; it must be {kind!r}")
    return settings


def described(kind: str, settings: dict[str, Any]) -> VisionArgs:
    """Return the model that ``settings`` describe, with the number of classes that they have."""
    library = LIBRARIES[kind]
    classes = len(settings.get("id2label") or ()) or int(settings.get("num_labels") or 1000)
    size = library.config(settings, classes).image_size
    if not isinstance(size, int):
        raise ValueError(f"image_size is {size}; it must be one number, of square pictures")
    return VisionArgs(kind=kind, settings=settings, classes=classes, image_size=size)
