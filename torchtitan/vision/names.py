"""Names of a classifier's tensors: here, and in the folders that transformers publishes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from torchtitan.vision.args import VisionArgs
from torchtitan.vision.model import VisionModel


@dataclass(frozen=True)
class Place:
    """A tensor in a folder.

    Attributes:
        name: As a classifier's folder has it.
        bare: As the folder of a model without output layer has it; as ``name`` for that layer.
        shape: Of the tensor.
    """

    name: str
    bare: str
    shape: tuple[int, ...]


def places_in_folder(args: VisionArgs) -> dict[str, Place]:
    """Return where each tensor of :class:`VisionModel` lies in a folder, by its name here.

    The library is asked for both names: it loads and saves folders of former releases, whose
    modules had other names than now.
    """
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        classifier = args.build()
        ours = VisionModel(args, classifier)
    named_there = {id(tensor): name for name, tensor in classifier.named_parameters()}
    prefix = f"{classifier.base_model_prefix}."

    def place(tensor: torch.Tensor) -> Place:
        (name,) = revert_weight_conversion(classifier, {named_there[id(tensor)]: tensor})
        return Place(name, name.removeprefix(prefix), tuple(tensor.shape))

    return {name: place(tensor) for name, tensor in ours.named_parameters()}


def new_tensors(
    places: Mapping[str, Place], stored: Mapping[str, tuple[int, ...]]
) -> dict[str, Place]:
    """Return the output layer's tensors that a folder lacks, or has for other classes.

    Args:
        places: Of the model, by the name here.
        stored: Shapes of the folder's tensors, by their name there.
    """
    return {
        name: place
        for name, place in places.items()
        if name.startswith("output.") and stored.get(place.name) != place.shape
    }


def name_in(stored: Mapping[str, object], place: Place) -> str:
    """Return what a folder calls a tensor; a model without output layer has no prefix."""
    return place.bare if place.name not in stored and place.bare in stored else place.name
