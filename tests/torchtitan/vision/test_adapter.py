"""Folders that transformers has written, loaded; and what it loads of ours."""

from pathlib import Path

import pytest
import torch

from tests.torchtitan.helpers.image_models import (
    CLASSES,
    KINDS,
    args_of,
    library_model,
    load,
    some_pictures,
)
from torchtitan.vision.adapter import VisionAdapter, places_in_folder
from torchtitan.vision.model import VisionModel

pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.slow]


@pytest.mark.parametrize("file_size", ["1GB", "40KB"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_loads_from_all_its_files(tmp_path: Path, kind: str, file_size: str) -> None:
    library = library_model(kind)
    library.save_pretrained(tmp_path, max_shard_size=file_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (file_size != "1GB")
    pictures = some_pictures(2)
    with torch.no_grad():
        expected, found = library(pictures).logits, load(tmp_path, kind)(pictures)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_of_other_classes_all_but_the_output_layer_loads(tmp_path: Path, kind: str) -> None:
    library = library_model(kind, num_labels=CLASSES + 1)
    library.save_pretrained(tmp_path)
    model = load(tmp_path, kind, classes=CLASSES)
    assert model.output.weight.shape[0] == CLASSES
    assert_all_but_the_output_layer(model, library)


@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_of_a_backbone_has_no_prefix(tmp_path: Path, kind: str) -> None:
    library = library_model(kind)
    getattr(library, kind).save_pretrained(tmp_path)
    assert_all_but_the_output_layer(load(tmp_path, kind), library)


def assert_all_but_the_output_layer(model: VisionModel, library: torch.nn.Module) -> None:
    """The rest is the library's, bit for bit, and the output layer was not touched."""
    expected = dict(VisionModel(model.model_args, library).named_parameters())
    for name, tensor in model.named_parameters():
        if name.startswith("output."):
            assert tensor.isnan().all()
        else:
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_names_go_to_the_folder_and_back(kind: str) -> None:
    args = args_of(kind)
    adapter, state = VisionAdapter(args, None), VisionModel(args).state_dict()
    there = adapter.to_hf(state)
    assert len(there) == len(state)
    back = adapter.from_hf(there)
    assert back.keys() == state.keys()
    assert all(back[name] is state[name] for name in state)


def test_names_of_a_vit_are_those_of_published_folders() -> None:
    """As in google/vit-base-patch16-224, which is older than the library's names."""
    names = {place.name for place in places_in_folder(args_of("vit")).values()}
    assert "vit.embeddings.cls_token" in names
    assert "vit.encoder.layer.3.attention.attention.query.weight" in names
    assert "vit.encoder.layer.7.output.dense.bias" in names
    assert "classifier.weight" in names


def test_saving_in_several_files_knows_a_place_for_a_new_output_layer(tmp_path: Path) -> None:
    library = library_model("vit")
    library.vit.save_pretrained(tmp_path, max_shard_size="40KB")
    adapter = VisionAdapter(args_of("vit"), str(tmp_path))
    places = places_in_folder(args_of("vit")).values()
    assert adapter.fqn_to_index_mapping is not None
    assert adapter.fqn_to_index_mapping.keys() == {place.name for place in places}
    n_files = len(list(tmp_path.glob("*.safetensors")))
    assert set(adapter.fqn_to_index_mapping.values()) == set(range(1, n_files + 1))
