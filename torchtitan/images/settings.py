"""What a configuration says of pictures: where they are, their colors, their classes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from timelyfreeze.files import parse_json, shown
from torchtitan.freezing.config import JobConfig
from torchtitan.images.sources import ImageExamples, ImagePlace, read_images
from torchtitan.images.transforms import ImageTransform

# Of ImageNet.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PREPROCESSOR = "preprocessor_config.json"


def training_place(config: JobConfig) -> ImagePlace:
    """Return where the pictures to train on are.

    Raises:
        ValueError: If no key says so.
    """
    return _place(config, "training.dataset_path", config.training.dataset_path, "")


def validation_place(config: JobConfig) -> ImagePlace:
    """Return where the pictures to validate on are: unless said otherwise those of training."""
    path = config.validation.dataset_path
    if path is None:
        training = config.training.dataset_path
        return _place(config, "training.dataset_path", training, config.vision.validation_split)
    return _place(config, "validation.dataset_path", path, config.vision.validation_split)


def _place(config: JobConfig, key: str, path: str | None, split: str) -> ImagePlace:
    if not path:
        raise ValueError(
            f"{key} is {path!r}; name a folder with a folder of pictures for each class, parquet "
            "files, or a data set on the hub"
        )
    vision = config.vision
    return ImagePlace(
        path,
        key,
        vision.image_column,
        vision.label_column,
        vision.subset,
        split or vision.split,
    )


def read_validation_images(config: JobConfig) -> tuple[ImageExamples, int]:
    """Return the pictures to validate on, and the number of classes.

    Raises:
        ValueError: As :func:`read_images` does, for them or for those to train on.
    """
    training = read_images(training_place(config))
    place = validation_place(config)
    if place.identity == training_place(config).identity:
        return training, class_count(config, training)
    return read_images(place, training.names), class_count(config, training)


def class_count(config: JobConfig, training: ImageExamples) -> int:
    """Return the number of classes, given the pictures to train on."""
    return config.vision.classes or training.classes


def configured_classes(config: JobConfig) -> int:
    """Return the number of classes of a run; the data is read if no key tells it.

    Raises:
        ValueError: As :func:`read_images` does.
    """
    return config.vision.classes or read_images(training_place(config)).classes


def transform_of(config: JobConfig, *, is_training: bool) -> ImageTransform:
    """Return what makes tensors of pictures."""
    vision = config.vision
    return ImageTransform(
        vision.image_size,
        _colors(config, "mean", MEAN),
        _colors(config, "std", STD),
        vision.augmentation,
        is_training,
    )


def color_errors(config: JobConfig) -> Iterator[str]:
    """Yield what is wrong with mean and standard deviation of colors."""
    for name, least in (("mean", "any"), ("std", "above 0")):
        key = f"vision.{name}"
        values: Any = getattr(config.vision, name)
        try:
            if values is None:
                key = f"image_{name} of {PREPROCESSOR} in model.hf_assets_path"
                values = _of_folder(config, name)
        except (OSError, ValueError) as error:
            yield f"{PREPROCESSOR} in model.hf_assets_path cannot be read: {error}"
            return
        if values is not None and not _are_colors(values, name):
            yield f"{key} is {shown(values)}; it must be three numbers, {least}"


def _are_colors(values: Any, name: str) -> bool:
    return (
        isinstance(values, list)
        and len(values) == 3
        and all(type(value) in (int, float) and abs(value) < float("inf") for value in values)
        and (name == "mean" or all(value > 0 for value in values))
    )


def _colors(config: JobConfig, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    values = getattr(config.vision, name)
    if values is None:
        values = _of_folder(config, name)
    return default if values is None else tuple(map(float, values))


def _of_folder(config: JobConfig, name: str) -> Any:
    """Return what the model's folder says of colors; None if nothing."""
    path = Path(config.model.hf_assets_path) / PREPROCESSOR
    if not path.is_file():
        return None
    table = parse_json(path.read_bytes())
    return table.get(f"image_{name}") if isinstance(table, dict) else table
