"""Image classifiers of transformers, cut into stages by TorchTitan like its own models.

The library is an optional extra, imported when a model is asked for.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.protocols import BaseModelArgs, ModelProtocol

from torchtitan.hf.flavors import FROM_FOLDER, weights_folder
from torchtitan.hf.llama_config import read_settings
from torchtitan.settings import IMAGE_MODELS, JobConfig

VIT, CONVNEXT = IMAGE_MODELS


@dataclass(frozen=True)
class Library:
    """A kind of image classifier, by the first part of its class names in transformers.

    ``take_blocks`` returns the blocks of a backbone from front to back. ``pool`` maps the last
    block's output to the normed vectors of pictures, shape [B, d]. With ``fixed_size`` pictures
    must have the configured size.
    """

    name: str
    count_blocks: Callable[[Any], int]
    take_blocks: Callable[[Any], list[nn.Module]]
    pool: Callable[[Tensor], Tensor]
    fixed_size: bool


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


LIBRARIES = {
    VIT: Library(
        "ViT",
        count_blocks=lambda config: config.num_hidden_layers,
        take_blocks=lambda backbone: list(backbone.layers),
        pool=lambda hidden: hidden[:, 0],  # the first token
        fixed_size=True,
    ),
    CONVNEXT: Library(
        "ConvNextV2",
        count_blocks=lambda config: sum(config.depths),
        take_blocks=_convnext_blocks,
        pool=lambda hidden: hidden.mean((-2, -1)),
        fixed_size=False,
    ),
}


@dataclass
class VisionArgs(BaseModelArgs):
    """An image classifier of transformers, by ``model.name`` and all or part of ``config.json``."""

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
        """Return the library's configuration; ValueError for refused settings."""
        import transformers

        given = {key: value for key, value in self.settings.items() if key != "num_labels"}
        if len(given.get("id2label") or ()) != self.classes:
            given = {k: v for k, v in given.items() if k not in ("id2label", "label2id")}
            given["num_labels"] = self.classes
        name = f"{self.library.name}Config"
        try:
            return getattr(transformers, name).from_dict(given)
        except Exception as error:  # the library has exceptions of its own for its checks
            raise ValueError(f"{name}: {error}") from error

    @property
    def model_class(self) -> str:
        """The classifier's class in transformers."""
        return f"{self.library.name}ForImageClassification"

    def build(self) -> Any:
        """Return the library's classifier, on the default device."""
        import transformers

        return getattr(transformers, self.model_class)._from_config(self.config())

    def update_from_config(self, job_config: Any, **kwargs: Any) -> None:
        """Take the number of classes and the size of pictures from a run."""
        self.classes = job_config.vision.classes or self.classes
        self.image_size = job_config.vision.image_size

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Return the number of parameters, and FLOPs of forward and backward for a picture."""
        channels = getattr(self.config(), "num_channels", 3)
        picture = torch.empty(1, channels, self.image_size, self.image_size, device="meta")
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad():
            model(picture)
        # A backward has two products for each of the forward.
        return sum(p.numel() for p in model.parameters()), 3 * counter.get_total_flops()


def _vit(width: int, layers: int, heads: int, patch_size: int, image_size: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "patch_size": patch_size,
        "image_size": image_size,
    }


def _convnext(width: int, depths: tuple[int, ...], patch_size: int) -> dict[str, Any]:
    widths = [width * 2**i for i in range(len(depths))]
    return {"hidden_sizes": widths, "depths": list(depths), "patch_size": patch_size}


# What each flavor has in its config.json; the first of each kind is for pictures of 32 x 32.
FLAVORS: dict[str, dict[str, dict[str, Any]]] = {
    VIT: {
        "4M": _vit(192, 9, 3, 4, 32),
        "B-16": _vit(768, 12, 12, 16, 224),
        "L-32": _vit(1024, 24, 16, 32, 224),
    },
    CONVNEXT: {"3M": _convnext(40, (2, 2, 6, 2), 2), "L": _convnext(192, (3, 3, 27, 3), 4)},
}


def vision_flavors(job_config: JobConfig) -> dict[str, VisionArgs]:
    """Return every flavor of ``model.name`` by name, "hf" only on demand."""
    name = job_config.model.name
    settings = dict(FLAVORS[name])
    if job_config.model.flavor == FROM_FOLDER:
        settings[FROM_FOLDER] = folder_settings(name, weights_folder(job_config))
    return {flavor: described(name, given) for flavor, given in settings.items()}


def folder_settings(kind: str, folder: Path) -> dict[str, Any]:
    """Return the ``config.json`` of a folder; ValueError if its model is of another kind."""
    settings = read_settings(folder)
    if (found := settings.get("model_type")) != kind:
        raise ValueError(f"{str(folder)!r} has a model of type {found!r}; it must be {kind!r}")
    return settings


def described(kind: str, settings: dict[str, Any]) -> VisionArgs:
    """Return the model of ``settings``, with their number of classes."""
    classes = len(settings.get("id2label") or ()) or int(settings.get("num_labels") or 1000)
    args = VisionArgs(kind=kind, settings=settings, classes=classes)
    size = args.config().image_size
    if not isinstance(size, int):
        raise ValueError(f"image_size is {size}; it must be one number, of square pictures")
    return replace(args, image_size=size)


class VisionModel(ModelProtocol):
    """Modules of a transformers classifier, under TorchTitan's names for cuts.

    Stages, partitions and frozen fronts know a model by these names, so the embedding of patches is
    ``tok_embeddings`` here too. Parts of other stages are None.
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
        """Return the logits, shape [B, classes], or the next stage's input."""
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
        """Draw the weights of the present parts by the library's rule for each module."""
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
    """Return the numbers per target: 1, or the number of classes."""
    return labels.shape[-1] if labels.is_floating_point() else 1


def build_image_loss(job_config: JobConfig, **kwargs: Any) -> Any:
    """Return the loss of ``[vision]``, for TorchTitan's spec."""
    return partial(image_loss, label_smoothing=job_config.vision.label_smoothing)
