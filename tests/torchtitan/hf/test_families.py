"""Folders that transformers makes, of every family: the same logits, gradients and files as there.

transformers comes with lm-eval (``scripts/setup.sh eval``); where it is missing, the model written
from the definition in ``tests/torchtitan/helpers/hf_models.py`` still judges logits and files.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.torchtitan.helpers.hf_models import read_folder, some_tokens
from tests.torchtitan.hf.test_adapter import load
from tests.torchtitan.hf.test_export import save_run
from torchtitan.hf.adapter import LlamaAdapter, tensor_errors
from torchtitan.hf.decoder import Decoder
from torchtitan.hf.export import export_run
from torchtitan.hf.folder import stored_shapes
from torchtitan.hf.llama_config import parse_config, read_config, to_settings

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA_31 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
QWEN_ROPE = {"rope_type": "default", "rope_theta": 1e6}
KINDS: dict[str, dict[str, Any]] = {
    "Llama-3.1": {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_parameters": LLAMA_31},
    "Llama-3.2": {
        "model_type": "llama",
        "rope_parameters": {**LLAMA_31, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "Llama with biases": {"model_type": "llama", "attention_bias": True},
    "Mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 24},
    "Mistral with a window": {"model_type": "mistral", "sliding_window": 64},
    "Qwen2.5": {"model_type": "qwen2", "rope_parameters": QWEN_ROPE},
    "Qwen2.5 small": {
        "model_type": "qwen2",
        "rope_parameters": QWEN_ROPE,
        "tie_word_embeddings": True,
    },
    "Qwen3": {"model_type": "qwen3", "rope_parameters": QWEN_ROPE, "head_dim": 32},
    "Qwen3 small": {
        "model_type": "qwen3",
        "rope_parameters": QWEN_ROPE,
        "head_dim": 20,
        "tie_word_embeddings": True,
        "attention_bias": True,
    },
}
BIASED = {"Llama with biases", "Qwen2.5", "Qwen2.5 small", "Qwen3 small"}


def make(folder: Path, kind: str, **more: Any) -> Any:
    """Return a model of transformers whose every tensor matters, saved in ``folder``."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**{**SIZES, **KINDS[kind], **more})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # As they begin, biases are 0, norms 1, and what a layer adds too little to tell by.
            spread, mean = (0.5, 1.0) if "norm" in name else (0.15, 0.0)
            parameter.copy_(mean + spread * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return model.eval()


def in_our_words(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return LlamaAdapter(read_config(folder), None).from_hf(tensors)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    theirs = make(tmp_path, kind)
    ours = load(tmp_path)
    tokens = some_tokens(2, 48, 128)
    expected = theirs(tokens).logits
    found = ours(tokens)
    assert expected.std() > 1.0
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    loss_of(found, tokens).backward()
    loss_of(expected, tokens).backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    mine = {name: p.grad for name, p in ours.named_parameters()}
    if theirs.config.tie_word_embeddings:
        # One tensor gets there what two get here.
        mine["tok_embeddings.weight"] = mine["tok_embeddings.weight"] + mine.pop("output.weight")
    wanted = in_our_words(tmp_path, gradients)
    assert mine.keys() == wanted.keys()
    for name, gradient in mine.items():
        error = float((gradient - wanted[name]).norm() / wanted[name].norm())
        assert error < 1e-5, f"{name}: {error:.1e}"


def test_scaling_that_was_added_by_hand_is_taken_as_transformers_takes_it(tmp_path: Path) -> None:
    make(tmp_path, "Qwen2.5")
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["rope_parameters"] == QWEN_ROPE
    scaling = {key: value for key, value in LLAMA_31.items() if key != "rope_theta"}
    (tmp_path / "config.json").write_text(json.dumps(settings | {"rope_scaling": scaling}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = some_tokens(2, 48, 128)
    torch.testing.assert_close(load(tmp_path)(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-4)
    (tmp_path / "config.json").write_text(
        json.dumps(settings | {"rope_scaling": {"type": "yarn", "factor": 4.0}})
    )
    with pytest.raises(ValueError, match="rope_type is 'yarn'"):
        read_config(tmp_path)


def test_the_output_layer_of_a_folder_that_says_it_is_tied_is_taken(tmp_path: Path) -> None:
    make(tmp_path, "Qwen2.5 small")
    weights = load_file(tmp_path / "model.safetensors")
    head = torch.randn_like(weights["model.embed_tokens.weight"])
    file = {**weights, "lm_head.weight": head}
    save_file(file, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens, ours = some_tokens(2, 48, 128), load(tmp_path)
    assert torch.equal(ours.output.weight, head)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-4)
    wrong = {**stored_shapes(tmp_path), "lm_head.weight": (127, 64)}
    (error,) = tensor_errors(read_config(tmp_path), wrong)
    assert error == "it has lm_head.weight [127, 64] instead of [128, 64]"


@pytest.mark.parametrize("kind", KINDS)
def test_each_tensor_of_a_folder_has_a_place_and_comes_back(tmp_path: Path, kind: str) -> None:
    make(tmp_path / "model", kind)
    source = tmp_path / "model"
    config = read_config(source)
    assert list(tensor_errors(config, stored_shapes(source))) == []
    assert any(name.endswith("bias") for name in stored_shapes(source)) is (kind in BIASED)
    folder = export_run(save_run(tmp_path, load(source), hf_assets_path=str(source)))
    (before, weights), (after, exported) = read_folder(source), read_folder(folder)
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
    assert {**before, "dtype": "float32", "torch_dtype": "float32"} == after


@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_of_our_own_describes_the_same_model(tmp_path: Path, kind: str) -> None:
    """Written where the folder's own does not fit, as after model.vocab_size."""
    theirs = make(tmp_path / "model", kind)
    settings = to_settings(read_config(tmp_path / "model"))
    assert parse_config(settings) == read_config(tmp_path / "model")
    other = transformers.AutoConfig.for_model(**settings)
    model = transformers.AutoModelForCausalLM.from_config(other, attn_implementation="eager").eval()
    model.load_state_dict(theirs.state_dict())
    tokens = some_tokens(1, 32, 128)
    assert torch.equal(model(tokens).logits, theirs(tokens).logits)


@pytest.mark.parametrize("kind", ["Mistral", "Qwen2.5", "Qwen3", "Qwen3 small"])
@torch.no_grad()
def test_packed_examples_compute_what_transformers_does_with_each(
    tmp_path: Path, kind: str
) -> None:
    theirs = make(tmp_path, kind)
    ours = load(tmp_path)
    lengths = [7, 12, 5]
    tokens = some_tokens(2, sum(lengths), 128)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    for rows in (slice(0, 2), slice(0, 1)):  # upstream takes another way for one row
        found = ours(tokens[rows], positions=positions[rows])
        expected = [theirs(part).logits for part in tokens[rows].split(lengths, dim=1)]
        torch.testing.assert_close(found, torch.cat(expected, dim=1), rtol=1e-5, atol=1e-4)


def test_random_weights_begin_as_the_families_do(tmp_path: Path) -> None:
    make(tmp_path, "Qwen3 small")
    with torch.device("meta"):
        model = Decoder(read_config(tmp_path))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    attention = model.layers["1"].attention
    for linear in (attention.wq, attention.wk, attention.wv, attention.wo):
        assert torch.equal(linear.bias, torch.zeros_like(linear.bias))
        assert 0.0 < float(linear.weight.detach().std()) < 0.05
    assert torch.equal(attention.q_norm.weight, torch.ones(20))
    assert torch.equal(attention.k_norm.weight, torch.ones(20))
    assert bool(model(some_tokens(1, 8, 128)).isfinite().all())


def test_work_is_counted_for_heads_of_their_own_width(tmp_path: Path) -> None:
    """6 operations a weight outside the embedding, and attention's two products, forth and back."""
    make(tmp_path, "Mistral")
    args = read_config(tmp_path)
    layer = 64 * 24 * (4 + 2 + 2 + 4) + 3 * 64 * 96 + 2 * 64
    n_parameters = 2 * 128 * 64 + 3 * layer + 64
    n_operations = 6 * (n_parameters - 128 * 64) + 6 * 3 * 4 * (2 * 24) * 32
    assert args.get_nparams_and_flops(Decoder(args), 32) == (n_parameters, n_operations)
