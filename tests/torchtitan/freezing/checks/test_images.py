"""Errors in ``[vision]``, and in pictures on this disk, before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchvision", reason="torchvision is not installed: the extra vision has it")

from tests.tools.make_assets.pictures import png, rows, write_folder, write_parquet
from tests.torchtitan.helpers.job_configs import config
from torchtitan.data.sources import ALL_EXAMPLES, ExampleSplit
from torchtitan.freezing.checks import (
    FEATURES,
    ConfigError,
    check_data,
    feature_errors,
    validation_split,
)
from torchtitan.freezing.checks.data import validation_errors
from torchtitan.freezing.checks.models import image_errors
from torchtitan.images.settings import MEAN, color_errors, configured_classes, transform_of
from torchtitan.settings import JobConfig


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    datasets.disable_progress_bars()


def images(path: Path | str | None, **changes: Any) -> JobConfig:
    return config(
        **{
            "freezing__method": "none",
            "training__dataset": "images",
            "training__dataset_path": None if path is None else str(path),
            "validation__dataset": "images",
            **changes,
        }
    )


def test_the_colors_of_the_models_folder_are_taken(tmp_path: Path) -> None:
    job_config = images(tmp_path, model__hf_assets_path=str(tmp_path))
    assert transform_of(job_config, is_training=True).mean == MEAN
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({"image_mean": [0.5, 0.25, 1], "image_std": [1, 2, 0.5]}))
    made = transform_of(job_config, is_training=True)
    assert (made.mean, made.std) == ((0.5, 0.25, 1.0), (1.0, 2.0, 0.5))
    assert list(color_errors(job_config)) == []
    job_config.vision.mean = [0.0, 0.0, 0.0]
    assert transform_of(job_config, is_training=True).mean == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"image_std": [1, 0, 1]}', "image_std of preprocessor_config.json in model.hf_assets_p"),
        ('{"image_mean": "gray"}', "is 'gray'; it must be a list"),
        ('["image_mean"]', "is list; it must be an object"),
        ("{", "preprocessor_config.json in model.hf_assets_path cannot be read"),
    ],
)
def test_colors_that_are_none_are_told(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(text)
    (error, *_) = color_errors(images(tmp_path, model__hf_assets_path=str(tmp_path)))
    assert why in error


def test_broken_pictures_and_labels_end_a_launch_before_it_starts(tmp_path: Path) -> None:
    good = write_parquet(tmp_path / "good.parquet", list(rows(2, 2)))
    broken = write_parquet(tmp_path / "broken.parquet", [(png(0, 0), 0), (b"text", 1)])
    labels = write_parquet(tmp_path / "labels.parquet", [(png(0, 0), 0), (png(0, 1), 2)])
    assert list(image_errors(images(good, validation__enable=True))) == []
    with pytest.raises(ConfigError) as error:
        check_data(images(broken))
    assert f"{broken}, row 1: is not a readable picture (no known format)" in str(error.value)
    # Classes are those of the data to train on.
    on_labels = images(good, validation__enable=True, validation__dataset_path=str(labels))
    (told,) = image_errors(on_labels)
    assert told.startswith(f"{labels}, row 1: the label is 2; with 2 classes")
    on_labels.vision.classes = 3
    assert list(image_errors(on_labels)) == []
    (told,) = image_errors(images(tmp_path / "none.parquet"))
    assert told.startswith(f"training.dataset_path is '{tmp_path / 'none.parquet'}'; there is no")


def test_hub_data_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", pytest.fail)
    assert list(image_errors(images("somebody/pictures", validation__enable=True))) == []


def test_classes_are_counted_unless_they_are_told(tmp_path: Path) -> None:
    job_config = images(write_folder(tmp_path, 3, 1))
    assert configured_classes(job_config) == 3
    job_config.vision.classes = 5
    assert configured_classes(job_config) == 5


def test_pictures_can_be_held_out_where_validation_reads_the_same(tmp_path: Path) -> None:
    held_out = {"data__validation_fraction": 0.5, "validation__enable": True}
    split = ExampleSplit(0.5, held_out=True)
    job_config = images(tmp_path, **held_out)
    assert validation_split(job_config) == split
    assert list(validation_errors(job_config)) == []
    job_config.validation.dataset_path = f"{tmp_path}/../{tmp_path.name}"
    assert validation_split(job_config) == split
    job_config.validation.dataset_path = str(tmp_path / "other")
    assert validation_split(job_config) == ALL_EXAMPLES
    (error,) = validation_errors(job_config)
    assert error.startswith("data.validation_fraction is 0.5, and validation reads other data")
    on_hub = images("somebody/pictures", **held_out)
    assert validation_split(on_hub) == split
    on_hub.vision.validation_split = "test"
    assert validation_split(on_hub) == ALL_EXAMPLES


def test_what_needs_numbered_rows_takes_pictures(tmp_path: Path) -> None:
    policy = "autofreeze"
    job_config = images(tmp_path, freezing__method=policy)
    object.__setattr__(getattr(job_config.freezing, policy), "checks_per_epoch", 5)
    assert not [e for e in feature_errors(job_config, FEATURES) if "checks_per_epoch" in e]
    job_config.training.dataset = "c4"
    assert [e for e in feature_errors(job_config, FEATURES) if "checks_per_epoch" in e]
