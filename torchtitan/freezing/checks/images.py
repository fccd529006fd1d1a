"""Finds errors in ``[vision]``, in pictures on this disk, and in models that classify them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torchtitan.tools.logging import logger

from torchtitan.data.rows.kinds import IMAGES, is_image_dataset
from torchtitan.freezing.checks.parallel import compiles_blocks, split_layers
from torchtitan.freezing.checks.pipeline import too_small
from torchtitan.freezing.config import JobConfig
from torchtitan.hf.folder import some_of, stored_tensors
from torchtitan.images.examples import ImageExamples, check_headers, check_labels
from torchtitan.images.settings import (
    class_count,
    color_errors,
    read_validation_images,
    training_place,
    validation_place,
)
from torchtitan.images.sources import ImagePlace, read_images
from torchtitan.images.transforms import AUGMENTATIONS
from torchtitan.vision.flavors import folder_settings
from torchtitan.vision.names import name_in, new_tensors, places_in_folder

# What makes the same weights another model, in the words of both kinds.
_MEANING = (
    "depths", "hidden_act", "hidden_size", "hidden_sizes", "intermediate_size", "layer_norm_eps",
    "num_attention_heads", "num_hidden_layers", "patch_size", "qkv_bias",
)  # fmt: skip
_OF_TEXT = (
    "vocab_size", "rope_scaling_factor", "rope_low_freq_factor", "rope_high_freq_factor",
    "rope_original_max_position_embeddings",
)  # fmt: skip
# How a folder's model is unlike the one that is asked for, and what its tensors lack.
Compared = tuple[list[str], list[str]]

_PACKAGES = {"PIL": "pillow", "torchvision": "torchvision"}


def vision_errors(config: JobConfig) -> Iterator[str]:
    """Yield what is wrong with ``[vision]``: key, value and rule."""
    vision = config.vision
    yield from too_small(config, "vision.image_size")
    yield from too_small(config, "vision.classes", lowest=0)
    if vision.augmentation not in AUGMENTATIONS:
        known = ", ".join(f'"{name}"' for name in AUGMENTATIONS)
        yield f"vision.augmentation is {vision.augmentation!r}; it must be one of {known}"
    if not 0.0 <= vision.mixup < math.inf:
        yield f"vision.mixup is {vision.mixup}; it must be a number of 0 or more"
    if not 0.0 <= vision.label_smoothing < 1.0:
        yield f"vision.label_smoothing is {vision.label_smoothing}; it must lie in [0, 1)"
    yield from color_errors(config)
    yield from _kind_errors(config)


def _kind_errors(config: JobConfig) -> Iterator[str]:
    training, validation = config.training, config.validation
    if not is_image_dataset(training.dataset):
        return
    for module, package in _PACKAGES.items():
        if find_spec(module) is None:
            yield (
                f"training.dataset is {training.dataset!r}, which needs {package}; install the "
                "extra: pip install 'timelyfreeze[vision]'"
            )
    if not training.dataset_path:
        yield (
            f"training.dataset_path is {training.dataset_path!r}; for pictures it must name a "
            "folder, parquet files or a data set on the hub"
        )
    if validation.enable and not is_image_dataset(validation.dataset):
        yield (
            f"validation.dataset is {validation.dataset!r}, and training.dataset is "
            f"{training.dataset!r}; it must be {IMAGES!r} too"
        )


def image_errors(config: JobConfig) -> Iterator[str]:
    """Yield what is wrong with pictures on this disk; hub data is not looked at.

    All labels are looked at, and the beginnings of up to 10,000 pictures.
    """
    if not is_image_dataset(config.training.dataset):
        return
    try:
        training = training_place(config)
        if not training.is_local:
            return
        images = read_images(training)
        _check(training, images, class_count(config, images))
        if config.validation.enable:
            place = validation_place(config)
            if place.is_local and place.identity != training.identity:
                _check(place, *read_validation_images(config))
    except (FileNotFoundError, ValueError) as error:
        yield str(error)


def _check(place: ImagePlace, images: ImageExamples, classes: int) -> None:
    check_labels(images, classes)
    n = check_headers(images)
    if n < len(images):
        logger.info(
            f"{place.path}: looked at {n} of {len(images)} pictures; damage in the others "
            "is told when they are read"
        )


def reads_training_images(config: JobConfig) -> bool:
    """Return whether validation is on the very pictures that training reads from."""
    kinds = (config.training.dataset, config.validation.dataset)
    if not all(map(is_image_dataset, kinds)) or not config.training.dataset_path:
        return False
    return validation_place(config).identity == training_place(config).identity


def image_model_errors(config: JobConfig, args: Any) -> Iterator[str]:
    """Say what keeps an image classifier from being trained as asked.

    Args:
        config: The configuration.
        args: Its model, as ``chosen_args`` returns it; changed to what the run asks for.
    """
    name, flavor = config.model.name, config.model.flavor
    args.update_from_config(config)
    dataset = config.training.dataset
    if not is_image_dataset(dataset):
        yield f"training.dataset is {dataset!r}; {name!r} reads pictures, so it must be {IMAGES!r}"
    for found in split_layers(config):
        yield f"{found}; blocks of {name!r} are not split, so it must be 1"
    for key in _OF_TEXT:
        if (value := getattr(config.model, key)) is not None:
            yield f"model.{key} is {value}; {name!r} reads no text, so it must be unset"
    if compiles_blocks(config):
        yield (
            f'compile.components has "model"; blocks of {name!r} are not compiled here, so set '
            'compile.enable = false or components = ["loss"]'
        )
    size = args.config().image_size
    if args.library.fixed_size and size != config.vision.image_size:
        yield (
            f"vision.image_size is {config.vision.image_size}; model.flavor {flavor!r} of {name!r} "
            f"has a position for each patch of {size} x {size} pixels, so it must be {size}"
        )


def compared_images(kind: str, args: Any, folder: Path) -> Compared:
    """Compare a folder with the model that a run asks for.

    Returns:
        How the folder's model is unlike, and, if it is not, what its tensors lack.

    Raises:
        ValueError: If the folder cannot be read.
    """
    found = args.library.config(folder_settings(kind, folder), args.classes)
    stored = {name: tensor.shape for name, tensor in stored_tensors(folder).items()}
    expected = args.config()
    unlike = [
        f"{key} is {there}, not {here}"
        for key in _MEANING
        if (there := getattr(found, key, None)) != (here := getattr(expected, key, None))
    ]
    return unlike, [] if unlike else list(_misfits(args, stored))


def _misfits(args: Any, stored: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    places = places_in_folder(args)
    new = new_tensors(places, stored)
    needed = {name_in(stored, place): place for name, place in places.items() if name not in new}
    if missing := [name for name in needed if name not in stored]:
        yield f"it lacks {some_of(missing)}"
    misshapen = [
        f"{name} {list(stored[name])} instead of {list(place.shape)}"
        for name, place in needed.items()
        if name in stored and stored[name] != place.shape
    ]
    if misshapen:
        yield f"it has {some_of(misshapen)}"
