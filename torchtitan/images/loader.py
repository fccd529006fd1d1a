"""Batches of pictures, from a loader that any number of ranks and workers can resume."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torchtitan.tools.logging import logger

from torchtitan.data.loader import ResizableDataloader, require_a_batch
from torchtitan.data.resumable import ResumableDataset
from torchtitan.data.sequences import ROWS
from torchtitan.data.sources import ALL_EXAMPLES, ExampleSplit
from torchtitan.freezing.config import JobConfig
from torchtitan.images.settings import (
    class_count,
    read_validation_images,
    training_place,
    transform_of,
)
from torchtitan.images.sources import ImageExamples, check_labels, read_images
from torchtitan.images.transforms import SHARE, ImageTransform, Mixup, Sample

# Not a setting: runs that differ in their seeds are compared on the same pictures.
_VALIDATION_SEED = 0


def build_image_dataloader(
    *, dp_world_size: int, dp_rank: int, job_config: JobConfig, keeps_parts: bool = False
) -> ResizableDataloader:
    """Build the loader of pictures to train on.

    Args:
        dp_world_size: Number of data-parallel ranks.
        dp_rank: This rank's number among them.
        job_config: ``[training]``, ``[data]`` and ``[vision]`` are read.
        keeps_parts: See :class:`torchtitan.data.resumable.ResumableDataset`.

    Returns:
        ResizableDataloader: Batches of ``({"input": float32 [B, 3, S, S], "rows": int64 [B]},
            labels)``, with labels int64 [B], or with mixup float32 [B, C].

    Raises:
        FileNotFoundError: If a local path does not exist.
        ValueError: If the data cannot be read, or gives no batch.
        ImageError: If a label is out of range.
    """
    training, data, vision = job_config.training, job_config.data, job_config.vision
    examples = read_images(training_place(job_config))
    classes = class_count(job_config, examples)
    check_labels(examples, classes)
    mixup = Mixup(vision.mixup, classes) if vision.mixup else None
    dataset = ImageDataset(
        examples,
        transform_of(job_config, is_training=True),
        data.seed,
        mixup,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        shuffle_seed=data.seed if data.shuffle else None,
        split=ExampleSplit(data.validation_fraction),
        keeps_parts=keeps_parts,
    )
    dataset.examples_of_a_reader(dp_world_size * max(1, training.dataloader.num_workers))
    return ResizableDataloader(
        dataset,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        batch_size=training.local_batch_size,
        collate_fn=None if mixup is None else mixup.collate,
        **{"drop_last": True, **vars(training.dataloader)},
    )


def build_validation_dataloader(
    *, dp_world_size: int, dp_rank: int, job_config: JobConfig, split: ExampleSplit = ALL_EXAMPLES
) -> ResizableDataloader:
    """Build the loader of pictures to validate on; it begins with the same ones every time.

    They come in a random order, so that the first few are a fair sample of data sorted by class.

    Args:
        dp_world_size: Number of data-parallel ranks.
        dp_rank: This rank's number among them.
        job_config: ``[validation]`` and ``[vision]`` are read.
        split: Which pictures of the data set to read.

    Returns:
        ResizableDataloader: Batches as :func:`build_image_dataloader` gives them, labels int64 [B].

    Raises:
        FileNotFoundError: If a local path does not exist.
        ValueError: If the data cannot be read, or gives no batch.
        ImageError: If a label is out of range.
    """
    validation = job_config.validation
    examples, classes = read_validation_images(job_config)
    check_labels(examples, classes)
    dataset = ImageDataset(
        examples,
        transform_of(job_config, is_training=False),
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        infinite=validation.steps != -1,
        shuffle_seed=_VALIDATION_SEED,
        split=split,
    )
    n_readers = dp_world_size * max(1, validation.dataloader.num_workers)
    count, size = dataset.examples_of_a_reader(n_readers), validation.local_batch_size
    require_a_batch(count, size, "validation", split)
    if (left := dataset.n_examples_of_epoch - count // size * size * n_readers) and (
        validation.steps == -1
    ):
        logger.info(
            f"{left} of {dataset.n_examples_of_epoch} pictures do not fill a batch of "
            f"validation.local_batch_size = {size} on every reader and are left out"
        )
    return ResizableDataloader(
        dataset,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        batch_size=size,
        # A loader draws a seed whenever it is iterated: not from the generator that training uses.
        generator=torch.Generator(),
        **{"drop_last": True, **vars(validation.dataloader)},
    )


class ImageDataset(ResumableDataset):
    """Pictures and labels of one data-parallel rank; order and resuming are those of its base.

    What is drawn for a picture depends on ``(seed, epoch, row)`` alone: not on who reads it, nor on
    what was read before.

    Args:
        examples: The data set.
        transform: Makes tensors of pictures.
        seed: Of the draws, at least 0.
        mixup: Says how much of itself a picture keeps; None for all.
        split: Which pictures to read.
        **place: What the base takes besides.

    Yields:
        ``({"input": float32 [3, S, S], "rows": int64 []}, label int64 [])``, where ``"rows"`` is
        the picture's index in the data set; with mixup also ``"share"``, float32 [].

    Raises:
        ValueError: If an argument is out of range, or there are fewer pictures than ranks.
        ImageError: If a picture cannot be read.
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
        n_examples = len(examples)
        super().__init__(n_examples, split.indices(n_examples), split=split, **place)
        self._examples = examples
        self._transform = transform
        self._seed = seed
        self._mixup = mixup

    def sample(self, epoch: int, index: int) -> Sample:
        """Return what an epoch has of the picture at ``index``."""
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
