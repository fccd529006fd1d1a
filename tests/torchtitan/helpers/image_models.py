"""Image classifiers of a few thousand parameters, for pictures of 16 x 16, and their folders.

Stages of the ConvNeXt have a width of their own each, so that stages of a pipeline send tensors of
different shapes.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from torchtitan.vision.adapter import VisionAdapter
from torchtitan.vision.model import VisionArgs, VisionModel, described, folder_settings

SIZE, CLASSES = 16, 10
VIT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "patch_size": 4,
    "image_size": SIZE,
    "num_labels": CLASSES,
}
CONVNEXT: dict[str, Any] = {
    "num_stages": 3,
    "hidden_sizes": [8, 12, 16],
    "depths": [2, 4, 2],
    "patch_size": 2,
    "image_size": SIZE,
    "num_labels": CLASSES,
}
SETTINGS = {"vit": VIT, "convnextv2": CONVNEXT}
KINDS = list(SETTINGS)
N_LAYERS = 8


def args_of(kind: str, **changes: Any) -> VisionArgs:
    """The small model of that kind."""
    return described(kind, {**SETTINGS[kind], **changes})


def some_pictures(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))


def move_all(module: torch.nn.Module, seed: int = 1) -> None:
    """Change every weight, so that none is at a value that hides what it does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def library_model(kind: str, **changes: Any) -> Any:
    """A classifier of the library's own making, with weights that are all different."""
    model = args_of(kind, **changes).build().eval()
    move_all(model)
    return model


def load(folder: Path, kind: str, classes: int = CLASSES) -> VisionModel:
    """Load as upstream's checkpoint manager does; what is not read stays NaN."""
    args = described(kind, folder_settings(kind, folder))
    args.classes = classes
    model = VisionModel(args)
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter, torch.nan)
    adapter = VisionAdapter(args, str(folder))
    wanted = adapter.to_hf(model.state_dict())
    dcp.load(wanted, storage_reader=adapter.get_hf_storage_reader(str(folder)), no_dist=True)
    model.load_state_dict(adapter.from_hf(wanted))
    return model.eval()
