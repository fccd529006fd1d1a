"""LLaMA models by name, each as its publisher's ``config.json`` describes it."""

from __future__ import annotations

from dataclasses import replace

from torchtitan.hf.llama_config import LlamaConfig, RopeScaling

_LLAMA_31_SCALING = RopeScaling(8.0, 1.0, 4.0, 8192)
_LLAMA_32_SCALING = RopeScaling(32.0, 1.0, 4.0, 8192)

_LLAMA_3_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=None,
    max_position_embeddings=8192,
)

_LLAMA_2_7B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    vocab_size=32000,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    max_position_embeddings=4096,
)

LLAMA_FLAVORS = {
    "SmolLM2-135M": LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        rope_scaling=None,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "Llama-3.2-1B": replace(
        _LLAMA_3_8B,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        rope_scaling=_LLAMA_32_SCALING,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    ),
    "Llama-3-8B": _LLAMA_3_8B,
    "Llama-3.1-8B": replace(
        _LLAMA_3_8B, rope_scaling=_LLAMA_31_SCALING, max_position_embeddings=131072
    ),
    "Llama-2-7B": _LLAMA_2_7B,
    "Llama-2-13B": replace(
        _LLAMA_2_7B,
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=40,
    ),
}
