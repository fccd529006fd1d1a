"""Where transformers keeps each kind of image classifier, and how one is taken apart.

The library is an optional extra, so it is imported when a model is asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torchtitan.freezing.config import IMAGE_MODELS

VIT, CONVNEXT = IMAGE_MODELS


@dataclass(frozen=True)
class Library:
    """One kind of image classifier.

    Attributes:
        config_class: What transformers calls its configuration.
        model_class: What it calls the classifier.
        base_class: What it calls the class that this and its other models have in common.
        count_blocks: Returns the number of blocks that a configuration asks for.
        take_blocks: Returns the blocks of a backbone from front to back.
        pool: From the last block's output to what is normed for each picture, shape [B, d].
        fixed_size: Whether pictures must have the size that the configuration names.
    """

    config_class: str
    model_class: str
    base_class: str
    count_blocks: Callable[[Any], int]
    take_blocks: Callable[[Any], list[nn.Module]]
    pool: Callable[[Tensor], Tensor]
    fixed_size: bool

    def config(self, settings: Mapping[str, Any], classes: int) -> Any:
        """Return the library's configuration of a model with so many classes.

        Args:
            settings: Contents of a ``config.json``, or a part of them.
            classes: Names of classes in ``settings`` are kept if they are so many.

        Raises:
            ImportError: If transformers is not installed.
            ValueError: If the library refuses a value.
        """
        import transformers

        given = {key: value for key, value in settings.items() if key != "num_labels"}
        if len(given.get("id2label") or ()) != classes:
            given = {k: v for k, v in given.items() if k not in ("id2label", "label2id")}
            given["num_labels"] = classes
        try:
            return getattr(transformers, self.config_class).from_dict(given)
        except Exception as error:  # the library has exceptions of its own for its checks
            raise ValueError(f"{self.config_class}: {error}") from error

    def build(self, config: Any) -> Any:
        """Return the library's classifier, on the default device."""
        import transformers

        return getattr(transformers, self.model_class)._from_config(config)

    def rule(self, config: Any) -> Callable[[nn.Module], None]:
        """Return what draws the weights of one module, its children left out."""
        import transformers

        # A model of the library that holds no module; it knows the configuration.
        rule: Callable[[nn.Module], None] = getattr(transformers, self.base_class)(
            config
        )._init_weights
        return rule


def _vit_blocks(backbone: Any) -> list[nn.Module]:
    return list(backbone.layers)


def _convnext_blocks(backbone: Any) -> list[nn.Module]:
    """Return the blocks of all stages; the first of a stage halves the picture before."""
    blocks: list[nn.Module] = []
    for stage in backbone.encoder.stages:
        downsampling = list(stage.downsampling_layer)
        for block in stage.layers:
            parts = {"downsampling": nn.Sequential(*downsampling)} if downsampling else {}
            # All are wrapped alike, so that tensors of one role have one name but for the number.
            blocks.append(nn.Sequential(OrderedDict(**parts, block=block)))
            downsampling = []
    return blocks


def _first_token(hidden: Tensor) -> Tensor:
    return hidden[:, 0]


def _mean_pixel(hidden: Tensor) -> Tensor:
    return hidden.mean((-2, -1))


LIBRARIES = {
    VIT: Library(
        "ViTConfig",
        "ViTForImageClassification",
        "ViTPreTrainedModel",
        lambda config: config.num_hidden_layers,
        _vit_blocks,
        _first_token,
        fixed_size=True,
    ),
    CONVNEXT: Library(
        "ConvNextV2Config",
        "ConvNextV2ForImageClassification",
        "ConvNextV2PreTrainedModel",
        lambda config: sum(config.depths),
        _convnext_blocks,
        _mean_pixel,
        fixed_size=False,
    ),
}
