"""Image classifiers that do not fit the run are refused, each with its key."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.torchtitan.helpers.image_models import CONVNEXT, SIZE, VIT, library_model
from tests.torchtitan.helpers.job_configs import config, errors
from torchtitan.freezing.checks import check
from torchtitan.settings import JobConfig
from torchtitan.upstream import fixes as upstream_fixes
from torchtitan.vision.model import FLAVORS

pytest.importorskip("transformers")
pytest.importorskip("torchvision")


@pytest.fixture(autouse=True)
def _flavors(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream_fixes.install()
    monkeypatch.setitem(FLAVORS["vit"], "tiny", VIT)
    monkeypatch.setitem(FLAVORS["convnextv2"], "tiny", CONVNEXT)


def of_images(**changes: Any) -> JobConfig:
    return config(**{
        "model__name": "vit",
        "model__flavor": "tiny",
        "training__dataset": "images",
        "training__dataset_path": "pictures",
        "vision__image_size": SIZE,
        **changes,
    })  # fmt: skip


@pytest.mark.parametrize("kind", ["vit", "convnextv2"])
def test_a_model_of_pictures_is_fine(kind: str) -> None:
    check(of_images(model__name=kind))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"model__flavor": "big"},
            "model.flavor is 'big', which vit does not have; known: 4M, B-16, L-32, hf, tiny",
        ),
        (
            {"vision__image_size": 32},
            "vision.image_size is 32; model.flavor 'tiny' of 'vit' has a position for each patch "
            "of 16 x 16 pixels, so it must be 16",
        ),
    ],
)
def test_what_does_not_fit_is_told(changes: dict[str, Any], expected: str) -> None:
    assert expected in errors(of_images(**changes))


def test_a_convnext_takes_pictures_of_any_size() -> None:
    check(of_images(model__name="convnextv2", vision__image_size=32))


def loading(folder: Path, **changes: Any) -> JobConfig:
    return of_images(
        model__hf_assets_path=str(folder),
        checkpoint__enable=True,
        checkpoint__initial_load_in_hf=True,
        job__dump_folder=str(folder / "outputs"),
        **changes,
    )


def test_a_folder_that_fits_is_fine_with_any_classes(tmp_path: Path) -> None:
    library_model("vit").save_pretrained(tmp_path)
    for classes in (0, 10, 3):
        check(loading(tmp_path, model__flavor="hf", vision__classes=classes))


def test_a_folder_of_another_kind_is_told(tmp_path: Path) -> None:
    library_model("vit").save_pretrained(tmp_path)
    error = errors(loading(tmp_path, model__name="convnextv2", model__flavor="hf"))[0]
    assert error == (
        f"model.flavor is 'hf', and {str(tmp_path)!r} has a model of type 'vit'; it must be "
        "'convnextv2'"
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_attention_heads": 2}, "num_attention_heads is 2, not 4"),
        ({"num_hidden_layers": 9}, "num_hidden_layers is 9, not 8"),
    ],
)
def test_a_folder_that_is_not_the_flavor_is_told(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    """Its tensors would fit, or some of them."""
    library_model("vit", **changes).save_pretrained(tmp_path)
    (error,) = errors(loading(tmp_path))
    assert error == (
        f"checkpoint.initial_load_in_hf is true, and the model in {str(tmp_path)!r} is not that of "
        f"model.flavor 'tiny': {told}; choose the flavor that matches, or "
        'model.flavor = "hf" without model.vocab_size and model.rope_* for what the folder says'
    )


def test_a_folder_whose_files_are_not_what_it_says_is_told(tmp_path: Path) -> None:
    """The numbers of blocks and of patches stand in config.json and in the tensors."""
    library_model("vit", num_hidden_layers=7, image_size=32).save_pretrained(tmp_path)
    config_file = tmp_path / "config.json"
    words = json.loads(config_file.read_text())
    config_file.write_text(json.dumps({**words, "num_hidden_layers": 8}))
    lacks, misshapen = errors(loading(tmp_path))
    assert f"{str(tmp_path)!r} does not hold what its config.json says" in lacks
    assert ": it lacks vit.encoder.layer.7.attention" in lacks
    assert lacks.endswith(" and 8 more")
    assert misshapen.endswith(
        " has vit.embeddings.position_embeddings [1, 65, 32] instead of [1, 17, 32]"
    )
