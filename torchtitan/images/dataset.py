"""Pictures of one data-parallel rank as tensors, in a stream that is resumable to the picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torchtitan.data.resumable import ResumableDataset
from torchtitan.data.sequences import ROWS
from torchtitan.data.split import ALL_EXAMPLES, ExampleSplit
from torchtitan.images.examples import ImageExamples
from torchtitan.images.mixup import SHARE, Mixup, Sample
from torchtitan.images.transforms import ImageTransform


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
