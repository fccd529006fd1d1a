"""A configuration's settings of pictures: places, colors, classes."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from timelyfreeze.files import Within, read_as, read_object
from torchtitan.images.sources import ImageExamples, ImagePlace, read_images
from torchtitan.images.transforms import ImageTransform
from torchtitan.settings import JobConfig

# Of ImageNet.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_Real = Annotated[float, Within(-math.inf)]
_Pos = Annotated[float, Within(0.0, above=True)]
# What three numbers may be, and are if nothing says otherwise.
_COLORS = {"mean": (tuple[_Real, _Real, _Real], MEAN), "std": (tuple[_Pos, _Pos, _Pos], STD)}
PREPROCESSOR, _ASSETS = "preprocessor_config.json", "model.hf_assets_path"


def training_place(config: JobConfig) -> ImagePlace:
    """Return where the pictures to train on are; ValueError if no key says so."""
    return _place(config, "training", config.vision.split)


def validation_place(config: JobConfig) -> ImagePlace:
    """Return the place of the validation pictures, by default the training's."""
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
    return examples, config.vision.classes or training.classes


def configured_classes(config: JobConfig) -> int:
    """Return the number of classes of a run; the data is read without a key."""
    return config.vision.classes or read_images(training_place(config)).classes


def transform_of(config: JobConfig, *, is_training: bool) -> ImageTransform:
    """Return the transform from pictures to tensors."""
    vision, said = config.vision, _preprocessor(config)
    mean, std = (_colors(config, said, name) for name in _COLORS)
    return ImageTransform(vision.image_size, mean, std, vision.augmentation, is_training)


def color_errors(config: JobConfig) -> Iterator[str]:
    """Yield errors of mean and standard deviation of colors."""
    try:
        said = _preprocessor(config)
    except (OSError, ValueError) as error:
        yield f"{PREPROCESSOR} in {_ASSETS} cannot be read: {error}"
        return
    for name in _COLORS:
        try:
            _colors(config, said, name)
        except ValueError as error:
            yield str(error)


def _preprocessor(config: JobConfig) -> dict[str, Any]:
    path = Path(config.model.hf_assets_path) / PREPROCESSOR
    return read_object(path) if path.is_file() else {}


def _colors(config: JobConfig, said: Mapping[str, Any], name: str) -> tuple[float, ...]:
    """Return a key's colors, or else the model folder's, or else the usual."""
    values, key = getattr(config.vision, name), f"vision.{name}"
    if values is None:
        values, key = said.get(f"image_{name}"), f"image_{name} of {PREPROCESSOR} in {_ASSETS}"
    hint, usual = _COLORS[name]
    found: tuple[float, ...] = usual if values is None else read_as(hint, values, key)
    return found
