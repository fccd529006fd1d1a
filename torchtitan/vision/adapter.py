"""Weights of an image classifier, from a Hugging Face folder's names to ours and back."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.tools.logging import logger

from torchtitan.hf.adapter import RenamingReader
from torchtitan.hf.folder import Shapes, file_numbers, stored_shapes
from torchtitan.vision.model import VisionArgs, VisionModel


class VisionAdapter(StateDictAdapter):
    """Loads and saves folders of transformers; an output layer may be new."""

    def __init__(self, model_args: VisionArgs, hf_assets_path: str | None) -> None:
        super().__init__(model_args, None)
        self.hf_assets_path = hf_assets_path
        self._places = places_in_folder(model_args)
        self._ours = {place.name: name for name, place in self._places.items()}
        index = file_numbers(hf_assets_path)
        if index is not None:
            # A folder may lack the prefix, or the output layer, which saving one needs.
            self.fqn_to_index_mapping = {
                place.name: index.get(name_in(index, place), max(index.values()))
                for place in self._places.values()
            }

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the same tensors under a folder's names."""
        return {self._places[name].name: tensor for name, tensor in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the same tensors under our names."""
        return {self._ours[name]: tensor for name, tensor in hf_state_dict.items()}

    def get_hf_storage_reader(
        self, path: str, from_quantized: bool = False
    ) -> HuggingFaceStorageReader:
        """Return a reader of ``path``; missing tensors of the output layer stay as drawn."""
        stored = stored_shapes(Path(path))
        new = {p.name: p.shape for p in new_tensors(self._places, stored).values()}
        if new:
            lacks = ", ".join(f"{name} {list(shape)}" for name, shape in new.items())
            logger.info("%s has no %s; it is drawn again", path, lacks)
        here = [place for place in self._places.values() if place.name not in new]
        return RenamingReader(path, {place.name: name_in(stored, place) for place in here}, new)


@dataclass(frozen=True)
class Place:
    """A tensor in a folder: its name in a classifier's, and ``bare`` without an output layer."""

    name: str
    bare: str
    shape: tuple[int, ...]


def places_in_folder(args: VisionArgs) -> dict[str, Place]:
    """Return the places of :class:`VisionModel`'s tensors in a folder, by name here.

    The library gives both names, since folders of former releases have other names of modules.
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


def new_tensors(places: Mapping[str, Place], stored: Shapes) -> dict[str, Place]:
    """Return the output layer's tensors missing in a folder, or for other classes."""
    return {
        name: place
        for name, place in places.items()
        if name.startswith("output.") and stored.get(place.name) != place.shape
    }


def name_in(stored: Mapping[str, object], place: Place) -> str:
    """Return a folder's name of a tensor; a model without output layer has no prefix."""
    return place.bare if place.name not in stored and place.bare in stored else place.name
