"""A model goes to the hub with a card; a stand-in takes the hub's place."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tests.torchtitan.helpers.hf_models import FAMILIES, write_folder
from tests.torchtitan.hf.test_adapter import load
from tests.torchtitan.hf.test_export import save_run
from timelyfreeze.records.summary import SUMMARY_FILE, RunSummary, summary_to_json
from torchtitan.hf.export import model_card
from torchtitan.vision.export_command import main

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.slow]
SUMMARY = RunSummary(
    method="timelyfreeze", schedule="1F1B", data_seed=7, model="llama3 8M",
    dataset="alpaca /home/somebody/rows.jsonl tatsu-lab/alpaca", n_devices=4, ranks_per_replica=4,
    device="a processor", torch_version="2.13", steps=10, steps_done=10,
    started_at="2026-11-28T10:00:00+00:00",
    validation_loss=1.23456, time_to_loss=0.84,
)  # fmt: skip


class Hub:
    """What is called of the hub."""

    def __init__(self, token: str | None = "secret", failure: Exception | None = None) -> None:
        self.token, self.failure = token, failure
        self.called: list[Any] = []

    def get_token(self) -> str | None:
        return self.token

    def create_repo(self, repo: str, **how: Any) -> None:
        self.called.append((repo, how))

    def upload_folder(self, *, repo_id: str, folder_path: Path) -> str:
        self.called.append((repo_id, {path.name for path in folder_path.iterdir()}))
        if self.failure is not None:
            raise self.failure
        return "where it is"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    source = write_folder(tmp_path / "model", FAMILIES["llama3"])
    folder = save_run(tmp_path, load(source), hf_assets_path=str(source))
    (folder / SUMMARY_FILE).write_text(summary_to_json(SUMMARY))
    return folder


def with_hub(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> Hub:
    for name in ("get_token", "create_repo", "upload_folder"):
        monkeypatch.setattr(huggingface_hub, name, getattr(hub, name))
    return hub


def test_a_card_tells_data_method_and_figures_and_no_path() -> None:
    card = model_card("me/my-model", SUMMARY)
    assert card.startswith("---\nlibrary_name: transformers\n")
    for told in (
        "# my-model\n", "- **Data**: alpaca rows.jsonl tatsu-lab/alpaca, seed 7\n",
        "- **Method**: `timelyfreeze`, 1F1B, 4 processes; 10 of 10 steps\n",
        "| validation loss | 1.2346 |\n", "| time to loss | 0.84 |\n",
    ):  # fmt: skip
        assert told in card
    assert "somebody" not in card
    assert "started" not in card


def test_the_folder_is_sent_with_its_card(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = with_hub(monkeypatch, Hub())
    assert main([str(run), "--push", "me/my-model"]) == 0
    created, (repo, files) = hub.called
    assert created == ("me/my-model", {"private": True, "exist_ok": True})
    assert repo == "me/my-model"
    assert {"README.md", "config.json", "model.safetensors"} <= files
    assert capsys.readouterr().out.splitlines()[-2:] == [str(run / "hf_step-10"), "where it is"]


@pytest.mark.parametrize(
    ("repo", "token", "told"),
    [
        ("me/my-model", None, "set HF_TOKEN or run hf auth login"),
        ("my-model", "secret", "--push is 'my-model'; it must be OWNER/NAME"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_anything_is_written(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], repo: str,
    token: str | None, told: str,
) -> None:  # fmt: skip
    hub = with_hub(monkeypatch, Hub(token))
    assert main([str(run), "--push", repo]) == 2
    assert told in capsys.readouterr().err
    assert not (run / "hf_step-10").exists()
    assert hub.called == []


def test_where_sending_fails_the_folder_stays_and_the_way_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_hub(monkeypatch, Hub(failure=ConnectionError("the line is dead")))
    assert main([str(run), "--push", "me/my-model"]) == 2
    folder = run / "hf_step-10"
    assert f"the line is dead; {folder} is whole, so try: hf upload me/my-model {folder}" in (
        capsys.readouterr().err
    )
    assert (folder / "config.json").exists()
