"""What an image classifier is made of, in TorchTitan's form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.protocols import BaseModelArgs

from torchtitan.freezing.config import JobConfig
from torchtitan.vision.library import LIBRARIES, VIT, Library


@dataclass
class VisionArgs(BaseModelArgs):
    """An image classifier of transformers.

    Attributes:
        kind: As ``model.name``.
        settings: Contents of its ``config.json``, or a part of them.
        classes: Width of the output layer.
        image_size: Height and width of the pictures, in pixels.
    """

    kind: str = VIT
    settings: dict[str, Any] = field(default_factory=dict)
    classes: int = 1000
    image_size: int = 224

    @property
    def library(self) -> Library:
        """Where transformers keeps this kind."""
        return LIBRARIES[self.kind]

    @property
    def n_layers(self) -> int:
        """Number of blocks, over all stages of a ConvNeXt."""
        return self.library.count_blocks(self.config())

    def config(self) -> Any:
        """Return the library's configuration; errors as ``Library.config``."""
        return self.library.config(self.settings, self.classes)

    def build(self) -> Any:
        """Return the library's classifier, on the default device."""
        return self.library.build(self.config())

    def update_from_config(self, job_config: JobConfig, **kwargs: Any) -> None:
        """Take the number of classes and the size of pictures that a run asks for."""
        self.classes = job_config.vision.classes or self.classes
        self.image_size = job_config.vision.image_size

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Return the number of parameters, and FLOPs of forward and backward for a picture.

        Args:
            model: The whole model, on the meta device.
            seq_len: Of texts; not used.
        """
        channels = getattr(self.config(), "num_channels", 3)
        picture = torch.empty(1, channels, self.image_size, self.image_size, device="meta")
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad():
            model(picture)
        # A backward has two products for each of the forward.
        return sum(p.numel() for p in model.parameters()), 3 * counter.get_total_flops()
