"""From a picture to the model's input, with draws keyed by seed, epoch and row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from torchtitan.data.sequences import Batch, Sample, as_batch

if TYPE_CHECKING:
    from PIL import Image

RESIZED_CROP, PADDED_CROP, NONE = "resized_crop", "padded_crop", "none"
AUGMENTATIONS = (RESIZED_CROP, PADDED_CROP, NONE)
# Of a picture's shorter side, what validation looks at where training takes parts of pictures:
# a whole picture would look farther away than those.
_CENTER = 0.875
# Of the size, what a padded picture may be moved to each side.
_PADDING = 1 / 8


@dataclass(frozen=True)
class ImageTransform:
    """Makes tensors of pictures, S x S; ``mean`` and ``std`` are of the three colors, of 1."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augmentation: str = NONE
    is_training: bool = False

    def __call__(self, picture: Image.Image, *key: int) -> Tensor:
        """Return float32 [3, S, S]; every draw depends on the numbers of ``key`` alone."""
        seed = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
        with torch.random.fork_rng(devices=[], device_type="cpu"):
            # Not torch.manual_seed, which would also seed devices.
            torch.default_generator.manual_seed(int(seed))
            return self._transform(picture)

    @cached_property
    def _transform(self) -> Callable[[Any], Tensor]:
        from torchvision.transforms import v2

        return v2.Compose(
            [
                *self._cut(v2),
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(list(self.mean), list(self.std)),
                v2.ToPureTensor(),
            ]
        )

    def _cut(self, v2: Any) -> list[Any]:
        flip = v2.RandomHorizontalFlip()
        if self.is_training and self.augmentation == RESIZED_CROP:
            return [v2.RandomResizedCrop(self.size), flip]
        if self.is_training and self.augmentation == PADDED_CROP:
            padding = round(self.size * _PADDING)
            return [v2.Resize(self.size), v2.RandomCrop(self.size, padding=padding), flip]
        return [v2.Resize(self.shorter_side), v2.CenterCrop(self.size)]

    @property
    def shorter_side(self) -> int:
        """Pixels of the shorter side in validation, before the middle is cut out."""
        center = _CENTER if self.augmentation == RESIZED_CROP else 1.0
        return round(self.size / center)


SHARE = "share"
# Behind the numbers of a picture's other draws, so that these are not the same.
_DRAW = 1


@dataclass(frozen=True)
class Mixup:
    """Mixes each picture of a batch with its predecessor, the first with the last."""

    alpha: float
    classes: int

    def share(self, *key: int) -> Tensor:
        """Return how much of itself a picture keeps, float32 [], drawn from ``key`` alone."""
        drawn = np.random.default_rng([*key, _DRAW]).beta(self.alpha, self.alpha)
        return torch.tensor(drawn, dtype=torch.float32)

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Return the mixed batch of samples with shares; labels are float32 [B, C]."""
        inputs, labels = as_batch(samples)
        shares = inputs.pop(SHARE)
        pictures, targets = inputs["input"], functional.one_hot(labels, self.classes).float()
        inputs["input"] = _mixed(pictures, shares.view(-1, 1, 1, 1))
        return inputs, _mixed(targets, shares.view(-1, 1))


def _mixed(values: Tensor, shares: Tensor) -> Tensor:
    return torch.lerp(values.roll(1, dims=0), values, shares)
