"""What the headers of safetensors files tell, and every way in which a folder can be wrong."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.torchtitan.helpers.hf_models import FAMILIES, random_weights, write_folder
from torchtitan.hf.adapter import tensor_errors
from torchtitan.hf.folder import stored_shapes
from torchtitan.hf.llama_config import read_config

INDEX = "model.safetensors.index.json"


def errors(folder: Path) -> list[str]:
    return list(tensor_errors(read_config(folder), stored_shapes(folder)))


@pytest.mark.parametrize("n_files", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_headers_tell_what_was_written(tmp_path: Path, n_files: int, dtype: torch.dtype) -> None:
    settings = FAMILIES["llama31"]
    write_folder(tmp_path, settings, n_files=n_files, dtype=dtype)
    weights = random_weights(settings, dtype, 0)
    assert stored_shapes(tmp_path) == {name: tuple(t.shape) for name, t in weights.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_folder_has_no_errors(tmp_path: Path, family: str) -> None:
    assert errors(write_folder(tmp_path, FAMILIES[family], n_files=2)) == []


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no \.safetensors files"):
        stored_shapes(tmp_path)


def test_a_file_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    write_folder(tmp_path, FAMILIES["llama3"], n_files=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks model-00002-of-00003\.safetensors, which its"):
        stored_shapes(tmp_path)


def test_an_index_that_is_none_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, FAMILIES["llama3"])
    (tmp_path / INDEX).write_text(json.dumps(["model.safetensors"]))
    with pytest.raises(ValueError, match="is no index of tensors"):
        stored_shapes(tmp_path)


def test_a_tensor_may_lie_in_one_file_only(tmp_path: Path) -> None:
    write_folder(tmp_path, FAMILIES["llama3"])
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "other.safetensors")
    with pytest.raises(
        ValueError, match=r"model\.norm\.weight is in model\.safetensors and in other"
    ):
        stored_shapes(tmp_path)


def test_mistrals_own_form_of_the_weights_is_left_alone(tmp_path: Path) -> None:
    write_folder(tmp_path, FAMILIES["mistral"])
    save_file(
        {"layers.0.attention.wk.weight": torch.ones(4)}, tmp_path / "consolidated.safetensors"
    )
    assert errors(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is no whole safetensors file"),
        (b"version https://example.com/lfs", r"is no whole .*: .*header too large"),
        (struct.pack("<Q", 5) + b"[1,2]", "is no whole safetensors file"),
        (struct.pack("<Q", 50) + b"{}", "is no whole safetensors file"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        stored_shapes(tmp_path)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = write_folder(tmp_path, FAMILIES["llama3"]) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"is no whole .*: .*file not fully covered"):
        stored_shapes(tmp_path)


def stored(settings: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    weights = random_weights(settings, torch.float32, 0)
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def test_what_is_missing_too_much_or_misshapen_is_named(tmp_path: Path) -> None:
    config = read_config(write_folder(tmp_path, FAMILIES["llama3"]))
    tensors = stored(FAMILIES["llama3"])
    for layer in range(5):
        del tensors[f"model.layers.{layer}.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = (64,)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = (8,)
    tensors["lm_head.weight"] = (2049, 64)
    assert list(tensor_errors(config, tensors)) == [
        "it lacks model.layers.0.mlp.up_proj.weight, model.layers.1.mlp.up_proj.weight, "
        "model.layers.2.mlp.up_proj.weight, model.layers.3.mlp.up_proj.weight, "
        "model.layers.4.mlp.up_proj.weight",
        "it has lm_head.weight [2049, 64] instead of [2048, 64]",
        "it has model.layers.0.self_attn.q_proj.bias, for which the model has no place",
    ]


def test_only_a_tied_model_may_lack_its_output_layer(tmp_path: Path) -> None:
    config = read_config(write_folder(tmp_path / "untied", FAMILIES["llama3"]))
    tensors = stored(FAMILIES["llama3"])
    del tensors["lm_head.weight"]
    assert list(tensor_errors(config, tensors)) == ["it lacks lm_head.weight"]
    assert errors(write_folder(tmp_path / "tied", FAMILIES["smollm2"])) == []
