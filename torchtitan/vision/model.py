"""An image classifier that TorchTitan cuts into stages as it cuts its own models."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchtitan.protocols import ModelProtocol

from torchtitan.freezing.config import JobConfig
from torchtitan.vision.library import VisionArgs


class VisionModel(ModelProtocol):
    """Modules of a transformers classifier, under the names by which TorchTitan cuts.

    Stages, partitions and what enters behind a frozen front know a model by these names, so the
    embedding of patches is ``tok_embeddings`` here too. A part that another stage holds is None.
    """

    def __init__(self, model_args: VisionArgs, classifier: Any = None) -> None:
        super().__init__(model_args)
        self.model_args = model_args
        classifier = model_args.build() if classifier is None else classifier
        backbone = getattr(classifier, classifier.base_model_prefix)
        blocks = model_args.library.take_blocks(backbone)
        self.tok_embeddings = backbone.embeddings
        self.layers = nn.ModuleDict({str(i): block for i, block in enumerate(blocks)})
        self.norm = backbone.layernorm
        self.output = classifier.classifier

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits, shape [B, classes], or what the next stage gets."""
        if self.tok_embeddings is not None:
            hidden = hidden.to(next(self.tok_embeddings.parameters()).dtype)
            hidden = self.tok_embeddings(hidden)
        else:
            # Its gradient will be contiguous, as links between ranks want it.
            hidden = hidden.flatten(1).unflatten(1, hidden.shape[1:])
        for layer in self.layers.values():
            hidden = layer(hidden)
        if self.norm is not None:
            hidden = self.norm(self.model_args.library.pool(hidden))
        if self.output is not None:
            hidden = self.output(hidden)
        return hidden.contiguous()  # a block of ConvNeXt puts channels last, which no link takes

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Draw the weights of the parts that are here by the library's rule for each module."""
        import transformers

        args = self.model_args
        # A model of the library that holds no module; it knows the configuration.
        empty = getattr(transformers, f"{args.library.name}PreTrainedModel")(args.config())
        self.apply(empty._init_weights)


def image_loss(prediction: Tensor, labels: Tensor, *, label_smoothing: float) -> Tensor:
    """Return the sum of the losses of pictures, of labels int64 [B] or shares float32 [B, classes].

    Labels are smoothed in training alone: validation computes no gradients.
    """
    smoothing = label_smoothing if torch.is_grad_enabled() else 0.0
    return cross_entropy(prediction.float(), labels, reduction="sum", label_smoothing=smoothing)


def shares_of_target(labels: Tensor) -> int:
    """Return how many numbers say what one target is: 1, or one for each class."""
    return labels.shape[-1] if labels.is_floating_point() else 1


def build_image_loss(job_config: JobConfig, **kwargs: Any) -> Any:
    """Return the loss that ``[vision]`` asks for, as TorchTitan's spec wants it."""
    return partial(image_loss, label_smoothing=job_config.vision.label_smoothing)
