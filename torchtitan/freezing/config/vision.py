"""The section ``[vision]``: pictures, and what is done to them on the way to the model."""

from dataclasses import dataclass


@dataclass
class Vision:
    """How pictures (training.dataset "images") are read; see docs/vision.md."""

    image_size: int = 224
    """Height and width of the pictures that the model gets, in pixels."""

    image_column: str = "image"
    """Column of the pictures, in data that has columns."""

    label_column: str = "label"
    """Column of the labels: whole numbers from 0."""

    subset: str = ""
    """For a name on the hub: which of its data sets. Unset: the default one."""

    split: str = "train"
    """For a name on the hub: its part to train on."""

    validation_split: str = ""
    """For a name on the hub: its part to validate on. Unset: that of training."""

    classes: int = 0
    """Number of classes. 0 takes it from the data: from the names of its classes if it has them,
    else the highest label and 1."""

    augmentation: str = "resized_crop"
    """What training does to a picture at random. "resized_crop": a part of it, 8% to all of its
    area, resized; half of them flipped. "padded_crop", for small pictures: moved by up to an eighth
    of its size, half of them flipped. "none": the same as validation."""

    mean: list[float] | None = None
    """Mean of the colors red, green and blue, of 1, that is taken off. Unset: image_mean in
    preprocessor_config.json of model.hf_assets_path, else that of ImageNet."""

    std: list[float] | None = None
    """What colors are divided by then. Unset: image_std there, else that of ImageNet."""

    mixup: float = 0.0
    """Mix each picture and its label with another of the batch. The share comes from the beta
    distribution with this number twice. 0 mixes none."""

    label_smoothing: float = 0.0
    """Part of the label, in [0, 1), that is spread over all classes in training."""
