"""Checkpoints of image classifiers, turned into folders that transformers loads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.tools.make_assets.pictures import write_folder
from tests.torchtitan.helpers.image_models import (
    CLASSES,
    KINDS,
    SETTINGS,
    SIZE,
    args_of,
    library_model,
    load,
    some_pictures,
)
from tests.torchtitan.hf.test_export import save_run
from torchtitan.hf.export import export_run
from torchtitan.images.transforms import ImageTransform
from torchtitan.vision.export import FORMS
from torchtitan.vision.model import FLAVORS, VisionModel

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.slow]


def loaded_by_library(folder: Path) -> Any:
    """The folder's model; every tensor of it comes from the files."""
    model, info = transformers.AutoModelForImageClassification.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize("file_bytes", [10**9, 40_000])
@pytest.mark.parametrize("kind", KINDS)
def test_the_library_loads_what_was_trained(
    tmp_path: Path, kind: str, file_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained from scratch, for other classes than the flavor has: the checkpoint knows."""
    monkeypatch.setitem(FLAVORS[kind], "tiny", {**SETTINGS[kind], "num_labels": 1000})
    model = VisionModel(args_of(kind), library_model(kind)).eval()
    run = save_run(tmp_path, model, name=kind, flavor="tiny")
    folder = export_run(run, max_file_bytes=file_bytes, forms=FORMS)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (file_bytes < 10**9)
    pictures = some_pictures(2)
    with torch.no_grad():
        expected, library = model(pictures), loaded_by_library(folder)
        torch.testing.assert_close(library(pictures).logits, expected, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(load(folder, kind)(pictures), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_was_trained_keeps_its_words(tmp_path: Path, kind: str) -> None:
    """Names of classes, and what the library reads pictures with."""
    source = tmp_path / "source"
    library = library_model(kind)
    library.config.id2label = {i: f"class {i}" for i in range(CLASSES)}
    library.save_pretrained(source)
    (source / "preprocessor_config.json").write_text("{}")
    model = VisionModel(args_of(kind), library)
    run = save_run(tmp_path, model, name=kind, flavor="hf", hf_assets_path=str(source))
    folder = export_run(run, dtype=torch.bfloat16, forms=FORMS)
    exported = loaded_by_library(folder)
    assert exported.config.id2label == library.config.id2label
    assert exported.dtype == torch.bfloat16
    assert (folder / "preprocessor_config.json").is_file()
    assert json.loads((folder / "config.json").read_text())["model_type"] == kind


def test_an_export_names_the_classes_and_reads_pictures_as_it_was_trained(tmp_path: Path) -> None:
    source, library = tmp_path / "source", library_model("vit")
    library.config.id2label = {i: f"fish {i}" for i in range(CLASSES)}
    library.save_pretrained(source)
    (source / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5], "size": 9}')
    write_folder(tmp_path / "pictures", CLASSES, 1)
    run = save_run(
        tmp_path,
        VisionModel(args_of("vit"), library),
        name="vit",
        flavor="hf",
        hf_assets_path=str(source),
    )
    settings = json.loads((run / "settings.json").read_text())
    settings["training"] |= {"dataset": "images", "dataset_path": str(tmp_path / "pictures")}
    settings["vision"] |= {"image_size": SIZE, "std": [0.2, 0.3, 0.4]}
    (run / "settings.json").write_text(json.dumps(settings))
    folder = export_run(run, forms=FORMS)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.id2label == {i: f"class_{i}" for i in range(CLASSES)}
    assert config.label2id == {name: i for i, name in config.id2label.items()}
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8))
    found = transformers.AutoImageProcessor.from_pretrained(folder)(picture, return_tensors="pt")
    colors = (0.5, 0.5, 0.5), (0.2, 0.3, 0.4)
    expected = ImageTransform(SIZE, *colors, augmentation="resized_crop")(picture)
    # Each rounds pixels to whole numbers once.
    torch.testing.assert_close(found.pixel_values[0], expected, rtol=0, atol=3 / 255 / 0.2)


def test_a_checkpoint_that_lacks_a_tensor_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FLAVORS["vit"], "tiny", SETTINGS["vit"])
    model = VisionModel(args_of("vit"), library_model("vit"))
    del model.layers["3"]
    run = save_run(tmp_path, model, name="vit", flavor="tiny")
    with pytest.raises(ValueError, match=r"lacks layers\.3\."):
        export_run(run, forms=FORMS)
