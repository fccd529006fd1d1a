"""Batches of pictures, from a loader resumable by any number of ranks and workers."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torchtitan.data.loader import ResizableDataloader, loader_of, validation_loader
from torchtitan.data.resumable import ResumableDataset
from torchtitan.data.sequences import ROWS, Sample, as_batch
from torchtitan.data.sources import ALL_EXAMPLES, ExampleSplit
from torchtitan.images.settings import (
    read_validation_images,
    training_place,
    transform_of,
)
from torchtitan.images.sources import ImageExamples, check_labels, read_images
from torchtitan.images.transforms import SHARE, ImageTransform, Mixup
from torchtitan.settings import JobConfig

# Not a setting: runs that differ in their seeds are compared on the same pictures.
_VALIDATION_SEED = 0


def build_image_dataloader(*, job_config: JobConfig, **place: Any) -> ResizableDataloader:
    """Build the loader of pictures to train on; with mixup, labels are float32 [B, C]."""
    training, data, vision = job_config.training, job_config.data, job_config.vision
    examples = read_images(training_place(job_config))
    classes = vision.classes or examples.classes
    check_labels(examples, classes)
    mixup = Mixup(vision.mixup, classes) if vision.mixup else None
    dataset = ImageDataset(
        examples,
        transform_of(job_config, is_training=True),
        data.seed,
        mixup,
        shuffle_seed=data.seed if data.shuffle else None,
        split=ExampleSplit(data.validation_fraction),
        **place,
    )
    collate = as_batch if mixup is None else mixup.collate
    loading = {"collate_fn": collate, **vars(training.dataloader)}
    return loader_of(dataset, training.local_batch_size, **loading)


def build_validation_dataloader(
    *, job_config: JobConfig, split: ExampleSplit = ALL_EXAMPLES, **place: Any
) -> ResizableDataloader:
    """Build the loader of validation pictures, in a constant random order."""
    validation = job_config.validation
    examples, classes = read_validation_images(job_config)
    check_labels(examples, classes)
    dataset = ImageDataset(
        examples,
        transform_of(job_config, is_training=False),
        infinite=validation.steps != -1,
        shuffle_seed=_VALIDATION_SEED,
        split=split,
        **place,
    )
    return validation_loader(dataset, validation)


class ImageDataset(ResumableDataset):
    """Pictures and labels of a data-parallel rank; order and resuming come from the base class.

    Draws for a picture depend on ``(seed, epoch, row)`` alone, not on its reader or earlier
    pictures. Yields ``({"input": float32 [3, S, S], "rows": int64 []}, label int64 [])``, where
    ``"rows"`` is the picture's index in the data set; with mixup also ``"share"``, float32 [].
    """

    def __init__(
        self,
        examples: ImageExamples,
        transform: ImageTransform,
        seed: int = 0,
        mixup: Mixup | None = None,
        split: ExampleSplit = ALL_EXAMPLES,
        **place: Any,
    ) -> None:
        n = len(examples)
        super().__init__(n, split.indices(n), split=split, **place)
        self._examples = examples
        self._transform = transform
        self._seed = seed
        self._mixup = mixup

    def sample(self, epoch: int, index: int) -> Sample:
        """Return an epoch's sample of the picture at ``index``."""
        key = (self._seed, epoch, index)
        picture = self._transform(self._examples.picture(index), *key)
        inputs = {"input": picture, ROWS: torch.tensor(index)}
        if self._mixup is not None:
            inputs[SHARE] = self._mixup.share(*key)
        return inputs, torch.tensor(self._examples.labels[index])

    def _rest_of_window(self, window: Sequence[int]) -> Iterator[Sample]:
        (number,) = window
        sample = self.sample(number // self.n_examples_of_epoch, self._index(number))
        self._leave(window)
        yield sample
