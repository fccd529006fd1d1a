"""Folders read into upstream's model in one process, tied ones and untied ones."""

import json
import logging
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

from tests.torchtitan.helpers.hf_models import (
    FAMILIES,
    logits_of,
    read_folder,
    some_tokens,
    write_folder,
)
from tests.torchtitan.helpers.job_configs import make_job_config
from torchtitan.checkpoints.finished import INDEX_FILE
from torchtitan.freezing.checks.models import model_errors
from torchtitan.hf.adapter import LlamaAdapter
from torchtitan.hf.decoder import Decoder
from torchtitan.hf.folder import file_numbers
from torchtitan.hf.llama_config import read_config

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """Load as upstream's checkpoint manager does."""
    args = read_config(folder)
    model = Decoder(args)
    for parameter in model.parameters():  # not the buffer, which is complex
        parameter.data = torch.full_like(parameter, torch.nan, dtype=dtype)
    adapter = LlamaAdapter(args, str(folder))
    wanted = adapter.to_hf(model.state_dict())
    dcp.load(wanted, storage_reader=adapter.get_hf_storage_reader(str(folder)), no_dist=True)
    model.load_state_dict(adapter.from_hf(wanted))
    return model


@pytest.mark.parametrize("n_files", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_definition(tmp_path: Path, family: str, n_files: int) -> None:
    folder = write_folder(tmp_path, FAMILIES[family], n_files=n_files)
    tokens = some_tokens(2, 96)
    with torch.no_grad():
        found = load(folder)(tokens)
    expected = logits_of(folder, tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_bfloat16_files_load_into_either_precision(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, FAMILIES["smollm2"], dtype=torch.bfloat16)
    stored = read_folder(folder)[1]["model.embed_tokens.weight"]
    assert torch.equal(load(folder).tok_embeddings.weight, stored.float())
    low = load(folder, torch.bfloat16)
    assert {p.dtype for p in low.parameters()} == {torch.bfloat16}
    assert torch.equal(low.output.weight, stored)


@pytest.mark.parametrize("family", ["llama32", "smollm2"])
def test_a_stage_with_the_output_layer_alone_gets_the_embedding(
    tmp_path: Path, family: str
) -> None:
    folder = write_folder(tmp_path, FAMILIES[family], n_files=2)
    weights = read_folder(folder)[1]
    adapter = LlamaAdapter(read_config(folder), str(folder))
    wanted = {"lm_head.weight": torch.zeros_like(weights["model.embed_tokens.weight"])}
    dcp.load(wanted, storage_reader=adapter.get_hf_storage_reader(str(folder)), no_dist=True)
    assert torch.equal(wanted["lm_head.weight"], weights["model.embed_tokens.weight"])


def test_both_ends_on_one_rank_are_tensors_of_their_own(tmp_path: Path) -> None:
    model = load(write_folder(tmp_path, FAMILIES["smollm2"]))
    assert torch.equal(model.output.weight, model.tok_embeddings.weight)
    with torch.no_grad():
        model.output.weight.add_(1.0)
    assert not torch.equal(model.output.weight, model.tok_embeddings.weight)


def test_untying_is_said_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tied = write_folder(tmp_path / "tied", FAMILIES["smollm2"])
    untied = write_folder(tmp_path / "untied", FAMILIES["llama3"])
    with caplog.at_level(logging.INFO):
        load(untied)
        assert "are tied" not in caplog.text
        load(tied)
    assert [r.levelno for r in caplog.records if "are tied" in r.message] == [logging.INFO]


def test_saving_a_tied_folders_model_finds_a_file_for_the_output_layer(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, FAMILIES["smollm2"], n_files=3)
    args = read_config(folder)
    index = LlamaAdapter(args, str(folder)).fqn_to_index_mapping
    assert index["lm_head.weight"] == index["model.embed_tokens.weight"] == 1


def test_upstream_still_cannot_load_a_tied_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, FAMILIES["smollm2"], n_files=2)
    adapter = Llama3StateDictAdapter(read_config(folder), str(folder))
    assert "lm_head.weight" not in adapter.fqn_to_index_mapping
    wanted = {"lm_head.weight": torch.zeros(2048, 48)}
    with pytest.raises(
        CheckpointException, match=r"Missing key in checkpoint state_dict: lm_head\.weight"
    ):
        dcp.load(wanted, storage_reader=adapter.get_hf_storage_reader(str(folder)), no_dist=True)


@pytest.mark.parametrize("names", [("a", "b"), ("x-7-first", "x-7-second"), ("whole", "whole")])
def test_files_of_an_index_may_have_any_names(tmp_path: Path, names: tuple[str, str]) -> None:
    folder = write_folder(tmp_path, FAMILIES["llama3"])
    tensors = list(read_folder(folder)[1])
    places = {name: f"{names[i % 2]}.safetensors" for i, name in enumerate(tensors)}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": places}))
    args = read_config(folder)
    numbers = LlamaAdapter(args, str(folder)).fqn_to_index_mapping
    assert numbers == {name: 1 + (i % len(set(names))) for i, name in enumerate(tensors)}
    if names[0] == "a":
        with pytest.raises(AttributeError):  # still
            Llama3StateDictAdapter(args, str(folder))


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": {"a": 1}}', "{}"])
def test_an_index_that_is_none_is_told_before_anything_starts(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_FILE).write_text(text)
    told = list(model_errors(make_job_config(model__hf_assets_path=str(tmp_path))))
    assert len(told) == 1
    assert f"{INDEX_FILE}' is no index of tensors" in told[0]


def test_an_index_without_tensors_is_none(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text('{"weight_map": {}}')
    assert file_numbers(str(tmp_path)) is None
