"""LLaMA models in upstream's words, and back."""

from __future__ import annotations

from dataclasses import astuple

from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs

from torchtitan.hf.llama_config import LlamaConfig, RopeScaling


def feed_forward_size(args: TransformerModelArgs) -> int:
    """Return the width that upstream's ``FeedForward`` makes of ``args``."""
    size = _plain_feed_forward_size(args.dim)
    if args.ffn_dim_multiplier is not None:
        size = int(args.ffn_dim_multiplier * size)
    return args.multiple_of * -(-size // args.multiple_of)


def _plain_feed_forward_size(dim: int) -> int:
    return int(2 * 4 * dim / 3)


def model_args(config: LlamaConfig) -> TransformerModelArgs:
    """Return upstream's description of ``config``; every call gives one of its own."""
    scaling = config.rope_scaling
    return TransformerModelArgs(
        dim=config.hidden_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        vocab_size=config.vocab_size,
        # The half keeps the product, which is rounded down, clear of the next lower number.
        ffn_dim_multiplier=(config.intermediate_size + 0.5)
        / _plain_feed_forward_size(config.hidden_size),
        multiple_of=1,
        norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_theta,
        rope_scaling_args=RoPEScalingArgs(*(astuple(scaling) if scaling else (1.0,))),
        max_seq_len=config.max_position_embeddings,
    )


def config_of(args: TransformerModelArgs) -> LlamaConfig:
    """Return what upstream's ``args`` describe; the inverse of ``model_args``.

    Tied embeddings are unknown to ``args`` and come out as untied, which a trained model is.
    """
    scaling = args.rope_scaling_args
    return LlamaConfig(
        hidden_size=args.dim,
        intermediate_size=feed_forward_size(args),
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_heads if args.n_kv_heads is None else args.n_kv_heads,
        vocab_size=args.vocab_size,
        rms_norm_eps=args.norm_eps,
        rope_theta=float(args.rope_theta),
        rope_scaling=None
        if scaling.scaling_factor == 1.0
        else RopeScaling(*map(float, astuple(scaling)[:3]), astuple(scaling)[3]),
        max_position_embeddings=args.max_seq_len,
    )
