"""Memory of folders with biases, norms of heads and heads of their own width, by hand."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from tests.torchtitan.freezing.memory.test_estimate import config
from tests.torchtitan.helpers.hf_models import FAMILIES, write_folder
from torchtitan.freezing.memory.estimate import How, decoder_bytes, model_bytes
from torchtitan.hf.llama_config import parse_config

N_TOKENS = 2 * 128
# Width, feed-forward, width of a head; heads are 4 and 2 in each.
SIZES = {"mistral": (64, 224, 24), "qwen2": (64, 224, 16), "qwen3": (48, 128, 20)}


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("mixed", ["float32", "bfloat16"])
def test_a_layer_has_all_of_its_tensors(tmp_path: Path, family: str, mixed: str) -> None:
    folder = write_folder(tmp_path, FAMILIES[family])
    more = {"model__hf_assets_path": str(folder), "training__mixed_precision_param": mixed}
    layer = model_bytes(config("hf", **more)).layer
    width, ff, head = SIZES[family]
    biases = (4 + 2 + 2) * head if family == "qwen2" else 0
    head_norms = 2 * head if family == "qwen3" else 0
    linear = width * head * (4 + 2 + 2 + 4) + 3 * width * ff + biases
    assert layer.weights == 4 * (linear + 2 * width + head_norms)
    assert layer.casts == (2 * linear if mixed == "bfloat16" else 0)


def block_bytes(**changes: Any) -> int:
    args = parse_config({**FAMILIES["llama3"], **changes})
    return decoder_bytes(args, how=How(2, torch.float32), seq_len=128).layer.kept


def test_biases_keep_nothing() -> None:
    assert block_bytes(model_type="qwen2") == block_bytes()


def test_norms_of_heads_keep_their_input_and_a_number_a_head() -> None:
    kept = 4 * N_TOKENS * (4 + 2) * (16 + 1)
    assert block_bytes(model_type="qwen3", head_dim=16) == block_bytes() + kept


def test_wider_heads_keep_more() -> None:
    """Attention keeps queries, keys, values and its output, which the last product keeps too."""
    kept = 4 * N_TOKENS * (4 + 2 + 2 + 4) * (24 - 16)
    assert block_bytes(head_dim=24) == block_bytes() + kept


def test_what_is_counted_is_given_back() -> None:
    """A run counts again with each plan."""
    block_bytes()
    before = n_fakes()
    block_bytes()
    assert n_fakes() <= before


def n_fakes() -> int:
    gc.collect()
    return sum(type(found) is FakeTensor for found in gc.get_objects())
