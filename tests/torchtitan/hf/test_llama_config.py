"""Configurations of LLaMA models: read, compared, and turned into upstream's words and back."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.models.llama3 import Transformer, llama3_args
from torchtitan.models.llama3.model.args import RoPEScalingArgs
from torchtitan.models.llama3.model.model import FeedForward

from tests.torchtitan.helpers.hf_models import FAMILIES
from torchtitan.hf.adapter import tensor_shapes
from torchtitan.hf.decoder import as_decoder
from torchtitan.hf.flavors import LLAMA_FLAVORS
from torchtitan.hf.llama_config import (
    differences,
    feed_forward_size,
    parse_config,
    read_config,
    to_settings,
)

# Published numbers of parameters; a tied output layer counts once.
N_PARAMETERS = {
    "SmolLM2-135M": 134_515_008,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3-8B": 8_030_261_248,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-2-7B": 6_738_415_616,
    "Llama-2-13B": 13_015_864_320,
}
# config.json as published, cut down to what matters here.
LLAMA_2_13B = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "max_position_embeddings": 4096,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 40,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
LLAMA_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA_32_1B = {
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA_SCALING,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}


@pytest.mark.slow
def test_every_flavor_has_its_published_number_of_parameters() -> None:
    assert LLAMA_FLAVORS.keys() == N_PARAMETERS.keys()
    for name, config in LLAMA_FLAVORS.items():
        assert sum(map(math.prod, tensor_shapes(config).values())) == N_PARAMETERS[name]


@pytest.mark.parametrize("name", LLAMA_FLAVORS)
def test_upstreams_model_of_a_flavor_has_its_tensors(name: str) -> None:
    config = LLAMA_FLAVORS[name]
    with torch.device("meta"):
        model = Transformer(replace(config, n_layers=1, max_seq_len=8))
    untied = replace(config, n_layers=1, tie_word_embeddings=False)
    assert sorted(map(tuple, (p.shape for p in model.parameters()))) == sorted(
        tensor_shapes(untied).values()
    )


@pytest.mark.parametrize(
    ("settings", "flavor"), [(LLAMA_2_13B, "Llama-2-13B"), (LLAMA_32_1B, "Llama-3.2-1B")]
)
def test_a_published_configuration_is_its_flavor(settings: dict[str, Any], flavor: str) -> None:
    assert parse_config(settings) == LLAMA_FLAVORS[flavor]


def test_both_forms_of_rotary_embeddings_mean_the_same() -> None:
    settings = dict(LLAMA_32_1B)
    scaling = settings.pop("rope_scaling")
    settings["rope_parameters"] = {"rope_theta": settings.pop("rope_theta"), **scaling}
    assert parse_config(settings) == parse_config(LLAMA_32_1B)
    settings["rope_parameters"] = {"rope_theta": 1e5, "rope_type": "default"}
    assert parse_config(settings).rope_scaling_args.scaling_factor == 1.0
    assert parse_config(settings).rope_theta == 1e5


def test_what_is_left_out_is_what_transformers_takes() -> None:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    config = parse_config(sizes)
    assert (config.n_kv_heads, config.norm_eps, config.rope_theta) == (4, 1e-6, 1e4)
    assert (config.rope_scaling_args.scaling_factor, config.tie_word_embeddings) == (1.0, False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mixtral"}, "model_type is 'mixtral'; known: llama, mistral, qwen2, qwen3"),
        ({"model_type": ["llama"]}, "model_type is ['llama']"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"head_dim": 63}, "head_dim is 63; it must be an even number, 2 or more"),
        ({"sliding_window": "wide"}, "sliding_window is 'wide'"),
        ({"max_window_layers": -1}, "max_window_layers is -1; it must be 0 or more"),
        ({"layer_types": 3}, "layer_types is 3; it must be a list"),
        ({"num_attention_heads": 3, "head_dim": None}, "num_attention_heads is 3"),
        ({"num_key_value_heads": 5}, "num_key_value_heads is 5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is None"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
    ],
)
def test_what_the_model_has_no_place_for_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="is") as error:
        parse_config({**LLAMA_32_1B, **change})
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("settings", "window"),
    [
        ({"model_type": "llama", "sliding_window": 32}, None),
        ({"model_type": "mistral"}, 4096),  # as transformers takes it
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral", "sliding_window": 512}, 512),
        ({"model_type": "qwen2", "sliding_window": 512}, None),
        ({"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True}, None),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 512,
                "use_sliding_window": True,
                "max_window_layers": 15,
            },
            512,
        ),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 512,
                "use_sliding_window": True,
                "max_window_layers": 16,
            },
            None,
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 512,
                "use_sliding_window": True,
                "max_window_layers": 15,
                "layer_types": ["full_attention"] * 16,
            },
            None,
        ),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 512,
                "use_sliding_window": True,
                "layer_types": ["full_attention"] * 15 + ["sliding_attention"],
            },
            512,
        ),
    ],
)
def test_a_window_counts_where_a_layer_has_one(
    settings: dict[str, Any], window: int | None
) -> None:
    """Of 16 layers; those from max_window_layers on have the window, 28 if it is not said."""
    assert parse_config({**LLAMA_32_1B, **settings}).sliding_window == window


@pytest.mark.parametrize(
    ("settings", "biases"),
    [
        ({"model_type": "llama"}, (False, False)),
        ({"model_type": "llama", "attention_bias": True}, (True, True)),
        ({"model_type": "mistral", "attention_bias": True}, (False, False)),
        ({"model_type": "qwen2", "attention_bias": False}, (True, False)),
        ({"model_type": "qwen3"}, (False, False)),
        ({"model_type": "qwen3", "attention_bias": True}, (True, True)),
    ],
)
def test_biases_are_those_that_transformers_makes(
    settings: dict[str, Any], biases: tuple[bool, bool]
) -> None:
    given = {key: value for key, value in LLAMA_32_1B.items() if key != "attention_bias"}
    config = parse_config({**given, **settings})
    assert (config.qkv_bias, config.output_bias) == biases
    assert config.qk_norm is (settings["model_type"] == "qwen3")


def test_all_that_is_unsupported_is_named_at_once() -> None:
    with pytest.raises(ValueError, match="model_type") as error:
        parse_config({**LLAMA_32_1B, "model_type": "qwen3_moe", "mlp_bias": True})
    assert "mlp_bias" in str(error.value)


def test_each_difference_has_a_sentence() -> None:
    flavor = LLAMA_FLAVORS["Llama-3.2-1B"]
    found = replace(
        flavor,
        n_kv_heads=32,
        rope_theta=10000.0,
        rope_scaling_args=RoPEScalingArgs(1.0),
        max_seq_len=4096,
        tie_word_embeddings=False,
    )
    assert differences(flavor, found) == [
        "num_key_value_heads is 32, not 8",
        "rope_theta is 10000, not 500000",
        f"rope_scaling is none, not {LLAMA_SCALING}",
    ]
    other = replace(flavor, model_type="qwen3", head_dim=80, qk_norm=True, sliding_window=64)
    assert differences(flavor, other) == [
        "model_type is qwen3, not llama",
        "head_dim is 80, not 64",
        "qk_norm is True, not False",
        "sliding_window is 64, not none",
    ]
    assert differences(flavor, replace(flavor, norm_eps=9.999999747378752e-06)) == []
    assert len(differences(flavor, replace(flavor, norm_eps=1e-6))) == 1


@pytest.mark.parametrize("dim", [48, 64, 576, 4096])
@pytest.mark.parametrize("factor", [0.3, 1.0, 2.66, 4.1])
def test_any_width_of_the_feed_forward_can_be_had(dim: int, factor: float) -> None:
    width = int(factor * dim) + 1
    sizes = {"hidden_size": dim, "intermediate_size": width, "head_dim": 64}
    args = parse_config({**LLAMA_2_13B, **sizes})
    with torch.device("meta"):
        built = FeedForward(dim, 4 * dim, args.multiple_of, args.ffn_dim_multiplier)
    assert built.w1.out_features == width


@pytest.mark.parametrize("name", llama3_args)
def test_the_width_upstream_makes_is_known(name: str) -> None:
    args = llama3_args[name]
    with torch.device("meta"):
        built = FeedForward(args.dim, 4 * args.dim, args.multiple_of, args.ffn_dim_multiplier)
    assert feed_forward_size(args) == built.w1.out_features


def test_there_and_back_is_the_same_model() -> None:
    for config in LLAMA_FLAVORS.values():
        assert parse_config(to_settings(config)) == config


def test_upstreams_own_8b_is_llama_31() -> None:
    assert differences(LLAMA_FLAVORS["Llama-3.1-8B"], as_decoder(llama3_args["8B"])) == []
    assert to_settings(as_decoder(llama3_args["8B"]))["rope_scaling"] == LLAMA_SCALING | {
        "factor": 8.0
    }


def test_a_folder_without_a_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="is list; it must be an object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_13B))
    assert read_config(tmp_path) == LLAMA_FLAVORS["Llama-2-13B"]


@pytest.mark.parametrize(
    "key", [key for key in FAMILIES["mistral"] | {"rope_parameters": 1} if key != "sliding_window"]
)
def test_a_null_is_not_there(key: str) -> None:
    given = {**FAMILIES["mistral"], key: None}
    absent = {name: value for name, value in given.items() if name != key}
    try:
        expected = parse_config(absent)
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            parse_config(given)
    else:
        assert parse_config(given) == expected


def test_a_null_in_rotary_embeddings_is_not_there() -> None:
    rope = {"rope_type": None, "type": None, "rope_theta": None, "factor": None}
    given = {**FAMILIES["llama3"], "rope_scaling": rope}
    assert parse_config(given) == parse_config({**given, "rope_scaling": None})
