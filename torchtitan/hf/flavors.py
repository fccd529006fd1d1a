"""The model of a configuration: a flavor by name, or a Hugging Face folder's."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs

from torchtitan.hf.llama_config import parse_config, read_config
from torchtitan.settings import IMAGE_MODELS, JobConfig

LLAMA = "llama3"
FROM_FOLDER = "hf"

# LLaMA models as their publishers' config.json describe them.
_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "rope_theta", "max_position_embeddings"),
    "tie_word_embeddings",
)
_PUBLISHED = {
    "SmolLM2-135M": (576, 1536, 30, 9, 3, 49152, 1e5, 8192, True),
    "Llama-3.2-1B": (2048, 8192, 16, 32, 8, 128256, 5e5, 131072, True),
    "Llama-3-8B": (4096, 14336, 32, 32, 8, 128256, 5e5, 8192, False),
    "Llama-3.1-8B": (4096, 14336, 32, 32, 8, 128256, 5e5, 131072, False),
    "Llama-2-7B": (4096, 11008, 32, 32, 32, 32000, 1e4, 4096, False),
    "Llama-2-13B": (5120, 13824, 40, 40, 40, 32000, 1e4, 4096, False),
}
_STRETCHED = {"Llama-3.2-1B": RoPEScalingArgs(32.0), "Llama-3.1-8B": RoPEScalingArgs(8.0)}
LLAMA_FLAVORS = {
    name: replace(
        parse_config({**dict(zip(_KEYS, row, strict=True)), "rms_norm_eps": 1e-5}),
        rope_scaling_args=_STRETCHED.get(name, RoPEScalingArgs(1.0)),
    )
    for name, row in _PUBLISHED.items()
}

EXTRA_FLAVORS = {
    LLAMA: {
        # For trying things out; RoPE unscaled, as in Llama 3.
        "8M": TransformerModelArgs(
            dim=256,
            n_layers=10,
            n_heads=8,
            n_kv_heads=4,
            vocab_size=2048,
            rope_theta=500000,
            rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
        ),
        **LLAMA_FLAVORS,
    }
}


def weights_folder(job_config: JobConfig) -> Path:
    """Return the folder of the model: where its weights are read from, or would be."""
    checkpoint = job_config.checkpoint
    named = checkpoint.initial_load_path if checkpoint.initial_load_in_hf else None
    return Path(named or job_config.model.hf_assets_path)


def known_flavors(job_config: JobConfig, upstream: Mapping[str, Any]) -> dict[str, Any]:
    """Return every flavor of ``model.name``: upstream's, ours, and the folder's for "hf"."""
    name = job_config.model.name
    flavors = {**upstream, **EXTRA_FLAVORS.get(name, {})}
    if name == LLAMA and job_config.model.flavor == FROM_FOLDER:
        try:
            flavors[FROM_FOLDER] = read_config(weights_folder(job_config))
        except ValueError as error:
            raise ValueError(f'model.flavor is "{FROM_FOLDER}", and {error}') from error
    return flavors


def chosen_args(job_config: JobConfig, upstream: Mapping[str, Any]) -> Any:
    """Return upstream's description of the model, the caller's own, with keys of ``[model]``."""
    model = job_config.model
    flavors = known_flavors(job_config, upstream)
    if model.flavor not in flavors:
        names = {*flavors, *([FROM_FOLDER] if model.name in (LLAMA, *IMAGE_MODELS) else [])}
        raise ValueError(
            f"model.flavor is {model.flavor!r}, which {model.name} does not have; "
            f"known: {', '.join(sorted(names))}"
        )
    # Not replace(), which transformers' configurations cannot do.
    args = deepcopy(with_rope_settings(flavors[model.flavor], job_config))
    if model.vocab_size is not None:
        args.vocab_size = model.vocab_size
    return args


def with_rope_settings(model_args: Any, job_config: JobConfig) -> Any:
    """Return ``model_args`` with the RoPE scaling of the configuration.

    Upstream's llama3 always applies Llama 3.1's scaling by 8, which is wrong for Llama 2, Llama 3,
    SmolLM2 (1) and Llama 3.2 (32). Unset keys keep the flavor's values.
    """
    wanted = {
        field.name: value
        for field in fields(RoPEScalingArgs)
        if (value := getattr(job_config.model, f"rope_{field.name}")) is not None
    }
    if not wanted:
        return model_args
    if not hasattr(model_args, "rope_scaling_args"):
        raise ValueError(
            f"model.rope_* is set but model.name is {job_config.model.name!r}, which has no RoPE "
            "scaling; remove the keys"
        )
    return replace(model_args, rope_scaling_args=replace(model_args.rope_scaling_args, **wanted))
