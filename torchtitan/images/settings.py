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
    """Return where the pictures to train on are; ValueError if no key says so."""
    return _place(config, "training", config.vision.split)


def validation_place(config: JobConfig) -> ImagePlace:
    """Return where the pictures to validate on are: unless said otherwise those of training."""
    section = "training" if config.validation.dataset_path is None else "validation"
    return _place(config, section, config.vision.validation_split or config.vision.split)


def _place(config: JobConfig, section: str, split: str) -> ImagePlace:
    key, vision = f"{section}.dataset_path", config.vision
    path = getattr(config, section).dataset_path
    if not path:
        raise ValueError(
            f"{key} is {path!r}; name a folder with a folder of pictures for each class, parquet "
            "files, or a data set on the hub"
        )
    return ImagePlace(path, key, vision.image_column, vision.label_column, vision.subset, split)


def read_validation_images(config: JobConfig) -> tuple[ImageExamples, int]:
    """Return the pictures to validate on, and the number of classes."""
    trained, place = training_place(config), validation_place(config)
    training = read_images(trained)
    is_same = place.identity == trained.identity
    examples = training if is_same else read_images(place, training.names)
    return examples, class_count(config, training)


def class_count(config: JobConfig, training: ImageExamples) -> int:
    """Return the number of classes, given the pictures to train on."""
    return config.vision.classes or training.classes


def configured_classes(config: JobConfig) -> int:
    """Return the number of classes of a run; the data is read if no key tells it."""
    return config.vision.classes or read_images(training_place(config)).classes


def transform_of(config: JobConfig, *, is_training: bool) -> ImageTransform:
    """Return what makes tensors of pictures."""
    vision = config.vision
    return ImageTransform(
        vision.image_size,
        tuple(map(float, _colors(config, "mean") or MEAN)),
        tuple(map(float, _colors(config, "std") or STD)),
        vision.augmentation,
        is_training,
    )


def color_errors(config: JobConfig) -> Iterator[str]:
    """Yield what is wrong with mean and standard deviation of colors."""
    for name, least in (("mean", "any"), ("std", "above 0")):
        key = f"vision.{name}"
        if getattr(config.vision, name) is None:
            key = f"image_{name} of {PREPROCESSOR} in model.hf_assets_path"
        try:
            values = _colors(config, name)
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


def _colors(config: JobConfig, name: str) -> Any:
    """Return what a key says of colors, or else the model's folder; None if nothing does."""
    values = getattr(config.vision, name)
    path = Path(config.model.hf_assets_path) / PREPROCESSOR
    if values is not None or not path.is_file():
        return values
    table = parse_json(path.read_bytes())
    return table.get(f"image_{name}") if isinstance(table, dict) else table
