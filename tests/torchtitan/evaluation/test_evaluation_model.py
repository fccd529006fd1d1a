"""Runs and model folders as they lie on a disk, written by hand."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from torchtitan.evaluation.command import Model, find_model


class Exporter:
    """Stands for the export: writes a folder and names it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.exported: list[tuple[Path, int]] = []

    def __call__(self, run: Path, step: int) -> Path:
        self.exported.append((run, step))
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.json").write_text("{}")
        return self.folder


@pytest.fixture
def exporter(tmp_path: Path) -> Exporter:
    return Exporter(tmp_path / "exported")


def write_run(dump: Path, name: str = "20261121_1F1B_none", steps: Sequence[int] = ()) -> Path:
    run = dump / "tb" / name
    run.mkdir(parents=True)
    settings = {"metrics": {"save_tb_folder": "tb"}, "checkpoint": {"folder": "checkpoint"}}
    (run / "settings.json").write_text(json.dumps(settings))
    for step in steps:
        folder = dump / "checkpoint" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / ".metadata").touch()
    return run


def test_a_hugging_face_folder_is_taken_as_it_is(tmp_path: Path, exporter: Exporter) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert find_model(tmp_path, None, exporter) == Model(tmp_path)
    assert exporter.exported == []
    with pytest.raises(ValueError, match=r"--step is 3, but .* is a Hugging Face folder"):
        find_model(tmp_path, 3, exporter)


def test_the_last_checkpoint_of_a_run_is_exported(tmp_path: Path, exporter: Exporter) -> None:
    run = write_run(tmp_path / "outputs", steps=(90, 1000, 200))
    # One that was being written when the run ended.
    (tmp_path / "outputs/checkpoint/step-2000").mkdir()
    assert find_model(run, None, exporter) == Model(exporter.folder, run, 1000)
    assert find_model(run, 90, exporter).step == 90
    assert exporter.exported == [(run, 1000), (run, 90)]


def test_what_was_exported_before_is_not_exported_again(tmp_path: Path, exporter: Exporter) -> None:
    run = write_run(tmp_path / "outputs", steps=(90, 200))
    (run / "hf_step-90").mkdir()
    (run / "hf_step-90/config.json").write_text("{}")
    assert find_model(run, 90, exporter) == Model(run / "hf_step-90", run, 90)
    assert exporter.exported == []
    assert find_model(run, 200, exporter).folder == exporter.folder


def test_a_dump_folder_stands_for_its_only_run(tmp_path: Path, exporter: Exporter) -> None:
    run = write_run(tmp_path / "outputs", steps=(10,))
    assert find_model(tmp_path / "outputs", None, exporter).run == run
    write_run(tmp_path / "outputs", name="second")
    with pytest.raises(ValueError, match="has 2 runs; name one: "):
        find_model(tmp_path / "outputs", None, exporter)


def test_a_run_without_the_checkpoint_is_refused(tmp_path: Path, exporter: Exporter) -> None:
    run = write_run(tmp_path / "a", steps=(10, 20))
    with pytest.raises(ValueError, match="has no checkpoint of step 15; it has 10, 20"):
        find_model(run, 15, exporter)
    run = write_run(tmp_path / "b")
    with pytest.raises(ValueError, match=r"b/checkpoint has no finished checkpoint; .*\.enable"):
        find_model(run, None, exporter)
    assert exporter.exported == []


def test_what_is_neither_is_refused(tmp_path: Path, exporter: Exporter) -> None:
    with pytest.raises(ValueError, match="is not a folder; name a run or a Hugging Face folder"):
        find_model(tmp_path / "none", None, exporter)
    with pytest.raises(ValueError, match=r"has neither config.json, .* nor settings.json"):
        find_model(tmp_path, None, exporter)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "settings.json is not JSON"),
        ("[]", "settings.json is list; it must be an object"),
        ('{"metrics": {}}', "settings.json lacks 'save_tb_folder'"),
    ],
)
def test_broken_settings_are_named(
    text: str, message: str, tmp_path: Path, exporter: Exporter
) -> None:
    run = write_run(tmp_path / "outputs", steps=(10,))
    (run / "settings.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        find_model(run, None, exporter)
