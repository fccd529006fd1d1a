"""Finds errors in ``[vision]`` and in the pictures that lie on disk."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec

from torchtitan.tools.logging import logger

from torchtitan.data.kinds import IMAGES, is_image_dataset
from torchtitan.freezing.checks.pipeline import too_small
from torchtitan.freezing.config import JobConfig
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
