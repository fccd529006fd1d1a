"""Cross-entropy of pictures, with classes or shares of classes as labels."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from torchtitan.freezing.config import JobConfig


def image_loss(prediction: Tensor, labels: Tensor, *, label_smoothing: float) -> Tensor:
    """Return the sum of the pictures' losses.

    Args:
        prediction: Logits, shape [B, classes].
        labels: Classes, int64, shape [B], or shares of classes, float32, shape [B, classes].
        label_smoothing: Part of the labels that is spread over all classes; of training alone, as
            validation computes no gradients.
    """
    smoothing = label_smoothing if torch.is_grad_enabled() else 0.0
    return cross_entropy(prediction.float(), labels, reduction="sum", label_smoothing=smoothing)


def shares_of_target(labels: Tensor) -> int:
    """Return how many numbers say what one target is: 1, or one for each class."""
    return labels.shape[-1] if labels.is_floating_point() else 1


def build_image_loss(job_config: JobConfig, **kwargs: Any) -> Any:
    """Return the loss that ``[vision]`` asks for, as TorchTitan's spec wants it."""
    return partial(image_loss, label_smoothing=job_config.vision.label_smoothing)
