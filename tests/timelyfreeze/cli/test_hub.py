"""Models by their id: what is one, what is fetched of it and how often, and what is said if not."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from timelyfreeze.cli import hub, torchrun

huggingface_hub = pytest.importorskip("huggingface_hub")
ROOT = Path(__file__).resolve().parents[3]
ID = "some-owner/Tiny-1.5B"


class FakeHub:
    """Stands in for the hub: notes what it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def snapshot_download(self, name: str, **options: Any) -> str:
        self.asked.append((name, options))
        return str(self.folder)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    made = FakeHub(tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    monkeypatch.chdir(tmp_path)
    return made


def test_an_id_is_two_words_that_are_no_path_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert hub.is_hub_id(ID)
    assert hub.is_hub_id("0-owner/model_v0.1")
    for path in (
        *("", "tokenizer", "./assets/tokenizer", "assets/hf/model", "/owner/model", "~/model"),
        *("../model", "owner/model/", "owner/", "owner/.hidden", "an owner/model"),
        "models/not-there",  # the folder is, so it is a path with a slip
    ):
        assert not hub.is_hub_id(path), path


def write_toml(folder: Path, *, loads: bool, name: str = ID) -> list[str]:
    path = folder / "run.toml"
    path.write_text(
        f'[model]\nhf_assets_path = "{name}"\n'
        f"[checkpoint]\ninitial_load_in_hf = {str(loads).lower()}\n"
    )
    return ["torchrun", "--nproc_per_node=2", "-m", "worker", "--job.config_file", str(path)]


@pytest.mark.parametrize(
    ("loads", "more", "weights"),
    [
        (True, [], True),
        (False, [], False),
        (False, ["--checkpoint.initial-load-in-hf"], True),
        (True, ["--checkpoint.no_initial_load_in_hf"], False),
        (True, ["--checkpoint.initial_load_in_hf=false"], False),
        (False, ["--checkpoint.initial_load_in_hf=true"], True),
        (True, ["--checkpoint.initial_load_path=elsewhere"], False),
    ],
)
def test_weights_are_fetched_where_a_run_begins_from_them(
    fake: FakeHub, tmp_path: Path, loads: bool, more: list[str], weights: bool
) -> None:
    arguments = [*write_toml(tmp_path, loads=loads), *more]
    found = hub.with_fetched_model(arguments)
    assert found == [*arguments, f"--model.hf_assets_path={fake.folder}"]
    ((name, options),) = fake.asked
    assert name == ID
    assert ("*.safetensors" in options["allow_patterns"]) is weights
    assert {"*.json", "*.jinja", "*.model", "*.txt"} <= set(options["allow_patterns"])
    assert options["ignore_patterns"] == ["*/*", "consolidated*"]


@pytest.mark.parametrize(
    "words", [["--model.hf_assets_path=a/b"], ["--model.hf-assets-path", "a/b"]]
)
def test_the_command_line_wins_over_the_file(
    fake: FakeHub, tmp_path: Path, words: list[str]
) -> None:
    hub.with_fetched_model([*write_toml(tmp_path, loads=False), *words])
    assert [name for name, _ in fake.asked] == ["a/b"]


def test_a_folder_is_taken_as_it_is(fake: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "some-owner" / "Tiny-1.5B").mkdir(parents=True)
    arguments = write_toml(tmp_path, loads=True)
    assert hub.with_fetched_model(arguments) == arguments
    assert hub.with_fetched_model(["--job.config_file=missing.toml"])
    (tmp_path / "broken.toml").write_text("model = 3 [")
    assert hub.with_fetched_model(["--job.config_file=broken.toml"])
    assert fake.asked == []


def test_a_host_fetches_once_and_its_processes_get_the_folder(
    fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torchrun gets; and a process that reads it asks the hub for nothing."""
    pytest.importorskip("torchtitan")
    from torchtitan.freezing.launch import read_config

    fake.folder.mkdir()
    seen = []
    monkeypatch.setattr("torch.distributed.run.main", lambda: seen.append(list(sys.argv)))
    monkeypatch.setattr(sys, "argv", write_toml(tmp_path, loads=True))
    torchrun.main()
    (words,) = seen
    for _ in range(2):
        job_config = read_config(words[4:], weights=True)
        assert job_config.model.hf_assets_path == str(fake.folder)
    assert len(fake.asked) == 1


def test_a_process_of_another_launcher_fetches_what_it_reads(fake: FakeHub, tmp_path: Path) -> None:
    pytest.importorskip("torchtitan")
    from torchtitan.freezing.launch import read_config

    words = write_toml(tmp_path, loads=True)[4:]
    for weights in (False, True):
        assert read_config(words, weights=weights).model.hf_assets_path == str(fake.folder)
    assert ["*.safetensors" in options["allow_patterns"] for _, options in fake.asked] == [
        False,
        True,
    ]


def test_what_cannot_be_fetched_is_told_before_any_process_starts(
    fake: FakeHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(name: str, **_: Any) -> str:
        raise OSError("no route\n\nto the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    monkeypatch.setattr("torch.distributed.run.main", lambda: pytest.fail("processes started"))
    monkeypatch.setattr(sys, "argv", write_toml(tmp_path, loads=True))
    with pytest.raises(SystemExit) as end:
        torchrun.main()
    assert end.value.code == 2
    said = capsys.readouterr().out
    assert said.startswith(f"error: model.hf_assets_path is {ID!r}, which is no folder here")
    assert "(OSError: no route to the hub)" in said


def cached(place: Path, files: dict[str, str]) -> None:
    """Lay out what the hub's own library keeps of a model."""
    model = place / "models--some-owner--Tiny-1.5B"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for name, text in files.items():
        (snapshot / name).write_text(text)


def test_without_the_hub_its_cache_serves_and_what_is_not_there_is_named(tmp_path: Path) -> None:
    """In a process of its own: the hub's library reads its settings when it is imported."""
    cached(tmp_path, {"config.json": json.dumps({"model_type": "llama"})})
    code = (
        f"from timelyfreeze.cli.hub import *; print(fetch_model({ID!r}, weights=True), flush=True);"
        "fetch_model('some-owner/other', weights=True)"
    )
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env=variables, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.stdout, done.stderr
    folder = Path(done.stdout.splitlines()[-1])
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "llama"}
    assert done.returncode != 0
    assert "ValueError: model.hf_assets_path is 'some-owner/other'" in done.stderr
