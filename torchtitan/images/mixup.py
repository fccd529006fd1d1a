"""Mixup (arXiv:1710.09412): pictures that are partly another one, and labels to match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import default_collate

Sample = tuple[dict[str, Tensor], Tensor]
SHARE = "share"
# Behind the numbers of a picture's other draws, so that these are not the same.
_DRAW = 1


@dataclass(frozen=True)
class Mixup:
    """Mixes each picture of a batch with the one before it, the first with the last.

    Attributes:
        alpha: Both parameters of the beta distribution, above 0.
        classes: Number of classes, C.
    """

    alpha: float
    classes: int

    def share(self, *key: int) -> Tensor:
        """Return how much of itself a picture keeps, float32 [], drawn from ``key`` alone."""
        drawn = np.random.default_rng([*key, _DRAW]).beta(self.alpha, self.alpha)
        return torch.tensor(drawn, dtype=torch.float32)

    def collate(self, samples: Sequence[Sample]) -> Sample:
        """Return the batch of samples, each of which has its share beside its input.

        Returns:
            The inputs, of which ``"input"`` is mixed, and labels float32 [B, C] with sums of 1.
        """
        inputs, labels = default_collate(list(samples))
        shares = inputs.pop(SHARE)
        pictures, targets = inputs["input"], functional.one_hot(labels, self.classes).float()
        inputs["input"] = _mixed(pictures, shares.view(-1, 1, 1, 1))
        return inputs, _mixed(targets, shares.view(-1, 1))


def _mixed(values: Tensor, shares: Tensor) -> Tensor:
    return torch.lerp(values.roll(1, dims=0), values, shares)
