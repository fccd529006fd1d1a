"""Which model a configuration asks for: a flavor by name, or what a Hugging Face folder says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs

from torchtitan.freezing.config import JobConfig
from torchtitan.hf.llama_args import model_args
from torchtitan.hf.llama_config import read_config
from torchtitan.hf.llama_flavors import LLAMA_FLAVORS

LLAMA = "llama3"
FROM_FOLDER = "hf"

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
        **{name: model_args(config) for name, config in LLAMA_FLAVORS.items()},
    }
}


def weights_folder(job_config: JobConfig) -> Path:
    """Return the folder of the model: where its weights are read from, or would be."""
    checkpoint = job_config.checkpoint
    named = checkpoint.initial_load_path if checkpoint.initial_load_in_hf else None
    return Path(named or job_config.model.hf_assets_path)


def known_flavors(job_config: JobConfig, upstream: Mapping[str, Any]) -> dict[str, Any]:
    """Return every flavor of ``model.name`` by name.

    Args:
        job_config: With flavor "hf", the folder it names is read.
        upstream: Flavors of the train spec that is registered for ``model.name``.

    Raises:
        ValueError: If the flavor is "hf" and the folder has no ``config.json`` of a LLaMA.
    """
    name = job_config.model.name
    flavors = {**upstream, **EXTRA_FLAVORS.get(name, {})}
    if name == LLAMA and job_config.model.flavor == FROM_FOLDER:
        flavors[FROM_FOLDER] = model_args(read_config(weights_folder(job_config)))
    return flavors


def chosen_args(job_config: JobConfig, upstream: Mapping[str, Any]) -> Any:
    """Return upstream's description of the model, with the keys of ``[model]`` applied.

    The object is the caller's own: a trainer writes the sequence length into it.

    Raises:
        ValueError: If the flavor is unknown, its folder cannot be used, or RoPE keys are set for a
            model that has none.
    """
    model = job_config.model
    flavors = known_flavors(job_config, upstream)
    if model.flavor not in flavors:
        names = [*flavors, *([FROM_FOLDER] if model.name == LLAMA else [])]
        raise ValueError(
            f"model.flavor is {model.flavor!r}, which {model.name} does not have; "
            f"known: {', '.join(sorted(names))}"
        )
    args = replace(with_rope_settings(flavors[model.flavor], job_config))
    if model.vocab_size is not None:
        args = replace(args, vocab_size=model.vocab_size)
    return args


def with_rope_settings(model_args: Any, job_config: JobConfig) -> Any:
    """Return ``model_args`` with the RoPE scaling that the configuration asks for.

    Upstream's llama3 always applies Llama 3.1's scaling by 8, which is wrong for Llama 2, Llama 3,
    SmolLM2 (1) and Llama 3.2 (32). Unset keys keep the flavor's values.
    """
    model = job_config.model
    wanted = {
        name: value
        for name, value in {
            "scaling_factor": model.rope_scaling_factor,
            "low_freq_factor": model.rope_low_freq_factor,
            "high_freq_factor": model.rope_high_freq_factor,
            "original_max_position_embeddings": model.rope_original_max_position_embeddings,
        }.items()
        if value is not None
    }
    if not wanted:
        return model_args
    if not hasattr(model_args, "rope_scaling_args"):
        raise ValueError(
            f"model.rope_* is set but model.name is {job_config.model.name!r}, which has no RoPE "
            "scaling; remove the keys"
        )
    return replace(model_args, rope_scaling_args=replace(model_args.rope_scaling_args, **wanted))
