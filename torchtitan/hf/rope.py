"""RoPE scaling of a model, as the configuration asks for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchtitan.freezing.config import JobConfig


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
