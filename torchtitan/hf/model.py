"""Upstream's llama3 and what Mistral, Qwen2 and Qwen3 have besides.

These families differ from LLaMA by biases of the projections, norms of queries and keys, and heads
of a width of their own. Everything else, the names of the tensors included, is upstream's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import precompute_freqs_cis
from torchtitan.models.utils import get_dense_model_nparams_and_flops

from torchtitan.hf.document_attention import DocumentAttention, DocumentTransformer


@dataclass
class DecoderArgs(TransformerModelArgs):
    """Upstream's description of a llama3 model, and in what another family differs from it.

    Attributes:
        model_type: Family, in the word of ``config.json``.
        head_dim: Width of one head; ``dim / n_heads`` if None.
        qkv_bias: Whether the projections of queries, keys and values have biases.
        output_bias: Whether the projection behind the attention has one.
        qk_norm: Whether each head of queries and keys goes through an RMSNorm.
        sliding_window: Tokens that a token sees, itself included; None for all before it. The model
            always shows all, so sequences must not be longer.
    """

    model_type: str = "llama"
    head_dim: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        """Fill in the width of a head."""
        if self.head_dim is None:
            self.head_dim = self.dim // self.n_heads

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Return the number of parameters, and of operations for each token."""
        return get_dense_model_nparams_and_flops(self, model, 2 * self.head_dim, seq_len)


def as_decoder(args: TransformerModelArgs) -> DecoderArgs:
    """Return ``args`` of upstream in our words; our own are returned as they are."""
    return args if isinstance(args, DecoderArgs) else DecoderArgs(**vars(args))


class DecoderAttention(DocumentAttention):
    """Upstream's attention with the biases, norms and width of heads that ``args`` ask for."""

    def __init__(self, args: DecoderArgs) -> None:
        super().__init__(args)
        self.head_dim = args.head_dim
        queries, keys = self.n_heads * args.head_dim, self.n_kv_heads * args.head_dim
        self.wq = nn.Linear(args.dim, queries, bias=args.qkv_bias)
        self.wk = nn.Linear(args.dim, keys, bias=args.qkv_bias)
        self.wv = nn.Linear(args.dim, keys, bias=args.qkv_bias)
        self.wo = nn.Linear(queries, args.dim, bias=args.output_bias)
        self.q_norm = nn.RMSNorm(args.head_dim, eps=args.norm_eps) if args.qk_norm else None
        self.k_norm = nn.RMSNorm(args.head_dim, eps=args.norm_eps) if args.qk_norm else None

    def init_weights(self, init_std: float) -> None:
        """Draw weights as upstream does; biases begin at 0 and norms at 1."""
        super().init_weights(init_std)
        for linear in (self.wq, self.wk, self.wv, self.wo):
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, the former two through their norms."""
        queries, keys, values = super().heads(x)
        if self.q_norm is not None:
            # Under autocast weights of norms keep their type, and torch has no fused norm of two.
            dtype = self.q_norm.weight.dtype
            queries = self.q_norm(queries.to(dtype)).type_as(values)
            keys = self.k_norm(keys.to(dtype)).type_as(values)
        return queries, keys, values


class Decoder(DocumentTransformer):
    """A model as ``config.json`` describes it, for packed sequences and others."""

    attention_class = DecoderAttention

    def _precompute_freqs_cis(self) -> torch.Tensor:
        args = self.model_args
        return precompute_freqs_cis(
            args.head_dim, args.max_seq_len, args.rope_theta, args.rope_scaling_args
        )
