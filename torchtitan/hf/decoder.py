"""A model as described in ``config.json``: upstream's llama3, extended for its relatives.

In packed sequences the examples do not see one another. Upstream ends a document at every end
token, also behind a conversation's answers, so a turn would not see earlier turns. And its masks
need kernels for GPUs alone (flex, varlen), while positions run on through all documents. Here a
document begins where ``positions`` is 0. Positions and ``lengths`` of documents travel to every
pipeline stage, split into microbatches like the batch.

GPUs have a kernel going from document to document: memory grows with the sequence. Elsewhere a
mask, a plain tensor, follows from ``positions``, at the cost of the full square of the sequence.
"""

from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.varlen import varlen_attn
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import (
    Attention,
    FeedForward,
    Transformer,
    precompute_freqs_cis,
    reshape_for_broadcast,
)
from torchtitan.models.utils import get_dense_model_nparams_and_flops

from timelyfreeze.runtime.linear import joined_output
from torchtitan.data.rows.kinds import is_instruct_dataset
from torchtitan.hf.learned_loss import learned_loss
from torchtitan.settings import JobConfig

# Before torch 2.12 the kernel took fewer heads of keys than of queries without being told.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
_KERNEL_DTYPES = (torch.bfloat16, torch.float16)


@dataclass
class DecoderArgs(TransformerModelArgs):
    """Upstream's description of a llama3 model, extended for its relatives.

    ``output_bias`` belongs to the projection behind the attention, ``qk_norm`` head by head. A
    token sees ``sliding_window`` tokens, itself included; None for all before it. Embeddings are
    tied in the files alone.
    """

    model_type: str = "llama"
    head_dim: int = 0  # 0 for ``dim / n_heads``
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        """Fill in the width of a head and the number of heads of keys."""
        self.head_dim = self.head_dim or self.dim // self.n_heads
        self.n_kv_heads = self.n_kv_heads or self.n_heads

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Return the number of parameters, and of operations per token."""
        return get_dense_model_nparams_and_flops(self, model, 2 * self.head_dim, seq_len)


def as_decoder(args: TransformerModelArgs) -> DecoderArgs:
    """Return ``args`` of upstream in our words; our own are returned as they are."""
    return args if isinstance(args, DecoderArgs) else DecoderArgs(**vars(args))


def document_mask(positions: Tensor) -> Tensor:
    """Return the attention mask: earlier tokens of the same document, and the token itself.

    ``positions``, int64 [B, T], count from 0 in every document. The mask is bool, [B, 1, T, T],
    True where the query (third dimension) sees the key (last).
    """
    documents = (positions == 0).cumsum(dim=1)
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril().unsqueeze(1)


def rotated(x: Tensor, freqs_cis: Tensor, positions: Tensor | None) -> Tensor:
    """Return rotary embeddings of heads, [B, T, heads, d], as upstream's of queries and keys."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    turned = pairs * reshape_for_broadcast(freqs_cis, pairs, positions)
    return torch.view_as_real(turned).flatten(3).type_as(x)


def _shared_mask(positions: Tensor) -> Tensor:
    """Return a microbatch's mask, a single tensor for all layers, kept for the backward."""
    if torch.compiler.is_compiling():
        return document_mask(positions)
    if not hasattr(positions, "document_mask"):
        positions.document_mask = document_mask(positions)
    return positions.document_mask


def document_bounds(lengths: Tensor) -> Tensor:
    """Return the begins of documents among a microbatch's tokens, and the end: int32 [B K + 1].

    ``lengths``, int32 [B, K], are lengths of documents by sequence; no device is waited for.
    """
    bounds = F.pad(lengths.flatten().cumsum(0, dtype=torch.int32), (1, 0))
    torch._dynamo.maybe_mark_dynamic(bounds, 0)  # another K compiles nothing again
    return bounds


@cache
def has_document_kernel(device: torch.device, head_dim: int) -> bool:
    """Return whether a device has the kernel for documents, as NVIDIA's from the A100 on do."""
    if device.type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and head_dim in range(8, 193, 8)


def attend_by_document(queries: Tensor, keys: Tensor, values: Tensor, bounds: Tensor) -> Tensor:
    """Attend within documents: [B, T, heads, d]; keys and values may have fewer heads."""
    most = queries.shape[1]  # the longest document there may be: a number that no batch changes
    tokens = (part.flatten(0, 1) for part in (queries, keys, values))
    found = varlen_attn(*tokens, bounds, bounds, most, most, window_size=(-1, 0), **_GROUPED)
    return found.view_as(queries)


class DecoderAttention(Attention):
    """Upstream's attention, with the biases, norms and heads of ``args``, under a mask if any."""

    linear_groups = (("wq", "wk", "wv"),)

    def __init__(self, args: DecoderArgs) -> None:
        super().__init__(args)
        self.head_dim = args.head_dim
        queries, keys = self.n_heads * args.head_dim, self.n_kv_heads * args.head_dim
        self.wq = nn.Linear(args.dim, queries, bias=args.qkv_bias)
        self.wk = nn.Linear(args.dim, keys, bias=args.qkv_bias)
        self.wv = nn.Linear(args.dim, keys, bias=args.qkv_bias)
        self.wo = nn.Linear(queries, args.dim, bias=args.output_bias)
        self.q_norm: Any = nn.RMSNorm(args.head_dim, eps=args.norm_eps) if args.qk_norm else None
        self.k_norm: Any = nn.RMSNorm(args.head_dim, eps=args.norm_eps) if args.qk_norm else None

    def init_weights(self, init_std: float) -> None:
        """Draw weights as upstream does; biases begin at 0 and norms at 1."""
        super().init_weights(init_std)
        for linear in (self.wq, self.wk, self.wv, self.wo):
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                norm.reset_parameters()

    def forward(
        self,
        x: Tensor,
        freqs_cis: Tensor,
        attention_masks: Tensor | None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Attend by a mask, by bounds of documents or as upstream; all is [B, T, dim]."""
        queries, keys, values = self._heads(x, freqs_cis, positions)
        if attention_masks is not None and attention_masks.dtype != torch.bool:
            if values.dtype in _KERNEL_DTYPES:
                attended = attend_by_document(queries, keys, values, attention_masks)
                return self.wo(attended.flatten(2))
            attention_masks = _shared_mask(positions)
        if attention_masks is not None:
            # Kernels that take a mask want as many heads of keys as of queries.
            keys = keys.repeat_interleave(self.n_rep, dim=2)
            values = values.repeat_interleave(self.n_rep, dim=2)
        q, k, v = (part.transpose(1, 2) for part in (queries, keys, values))  # [B, heads, T, d]
        if attention_masks is None:
            attended = self.inner_attention(q, k, v, enable_gqa=self.enable_gqa)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_masks)
        return self.wo(attended.transpose(1, 2).flatten(2))

    def _heads(
        self, x: Tensor, freqs_cis: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, [B, T, heads, d], the former two rotated."""
        shape, n_kv = (*x.shape[:2], -1, self.head_dim), self.n_kv_heads
        joined = joined_output((self.wq, self.wk, self.wv), x)
        if joined is not None and self.q_norm is None:
            both, values = joined.view(shape).split([self.n_heads + n_kv, n_kv], dim=2)
            both = rotated(both, freqs_cis, positions)  # half the launches of one after the other
            # A copy, since a view would keep all that was joined up to the backward.
            return *both.split([self.n_heads, n_kv], dim=2), values.contiguous()
        if joined is not None:
            queries, keys, values = joined.view(shape).split([self.n_heads, n_kv, n_kv], dim=2)
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        else:
            layers = (self.wq, self.wk, self.wv)
            queries, keys, values = (layer(x).view(shape) for layer in layers)
            if self.q_norm is not None:
                # Under autocast a norm's weight keeps its type, and no fused norm takes two types.
                dtype = self.q_norm.weight.dtype
                queries = self.q_norm(queries.to(dtype)).type_as(values)
                keys = self.k_norm(keys.to(dtype)).type_as(values)
        turned = (rotated(part, freqs_cis, positions) for part in (queries, keys))
        return *turned, values


class DecoderFeedForward(FeedForward):
    """Upstream's feed-forward, with two layers of the same input possibly computed as one."""

    linear_groups = (("w1", "w3"),)

    def forward(self, x: Tensor) -> Tensor:
        """Return W2 (silu(W1 x) * W3 x), [B, T, dim]."""
        joined = joined_output((self.w1, self.w3), x)
        return super().forward(x) if joined is None else self.w2(SwiGlu.apply(joined))


class SwiGlu(Function):
    """silu(a) * b of [..., 2 d], where a and b stand side by side; keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, joined: Tensor) -> Tensor:
        """Return the product, [..., d]."""
        ctx.save_for_backward(joined)
        gate, up = joined.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradients of a and of b side by side, for a single product."""
        (joined,) = ctx.saved_tensors
        gate, up = joined.chunk(2, dim=-1)
        both = torch.empty_like(joined)
        of_gate, of_up = both.chunk(2, dim=-1)
        torch.mul(gradient, F.silu(gate), out=of_up)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=of_gate)
        return both


class Decoder(Transformer):
    """Upstream's llama3 for packed sequences; without ``positions`` the same as upstream."""

    model_args: DecoderArgs

    def __init__(self, model_args: TransformerModelArgs) -> None:
        args = as_decoder(model_args)
        super().__init__(args)
        for layer in self.layers.values():
            layer.attention = DecoderAttention(args)
            layer.feed_forward.__class__ = DecoderFeedForward

    def forward(
        self,
        tokens: Tensor,
        attention_masks: Tensor | None = None,
        positions: Tensor | None = None,
        lengths: Tensor | None = None,
        learned: Tensor | None = None,
        n_learned: Tensor | None = None,
    ) -> Tensor:
        """Compute logits of tokens, [B, T], or a stage's output; within documents if packed.

        With ``learned`` and ``n_learned`` (``torchtitan.data.sequences``) a last stage computes
        the summed loss of learned tokens in place of logits.
        """
        if positions is not None and attention_masks is None:
            if lengths is None or not has_document_kernel(tokens.device, self.model_args.head_dim):
                attention_masks = document_mask(positions)
            else:
                attention_masks = document_bounds(lengths)
        if learned is None or n_learned is None or self.output is None:
            return super().forward(tokens, attention_masks, positions)
        hidden = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden, self.freqs_cis, attention_masks, positions)
        counts, is_sharded = n_learned.tolist(), isinstance(self, FSDPModule)
        return learned_loss(
            self._head, hidden, learned, counts, self.vocab_size, is_sharded=is_sharded
        )

    def _head(self, rows: Tensor) -> Tensor:
        """Compute logits of hidden states; FSDP has hooks on both modules together."""
        return self.output(rows if self.norm is None else self.norm(rows))

    def _precompute_freqs_cis(self) -> Tensor:
        args = self.model_args
        return precompute_freqs_cis(
            args.head_dim, args.max_seq_len, args.rope_theta, args.rope_scaling_args
        )


def for_packing(model_cls: type, flavor: str, model_args: Any) -> DecoderArgs:
    """Return the description of a model reading packed sequences; ValueError if impossible."""
    if model_cls is not Transformer:
        raise ValueError(
            "data.packing is true, and model.name is not llama3, whose attention alone can be kept "
            "within examples; set it to false"
        )
    if model_args.attn_type != "sdpa":
        raise ValueError(
            f"data.packing is true, and model.flavor {flavor!r} has attn_type "
            f"{model_args.attn_type!r}, which ends an example at every end token, also within a "
            "conversation; use a flavor with 'sdpa'"
        )
    return as_decoder(model_args)


def require_turns(flavor: str, model_args: Any) -> None:
    """Raise ValueError if a model cannot read conversations, an example to a sequence."""
    if getattr(model_args, "attn_mask_type", "causal") == "block_causal":
        raise ValueError(
            f"training.dataset may have conversations, and model.flavor {flavor!r} (attn_type "
            f"{model_args.attn_type!r}) ends a document at every end token, so that a turn would "
            "not see those before it; use a flavor with 'sdpa'"
        )


def learns_alone(config: JobConfig, model_args: Any) -> bool:
    """Return whether the last stage of a run computes logits of learned tokens alone.

    Their places are whole on each rank then, and so are logits.
    """
    parallelism = config.parallelism
    return (
        is_instruct_dataset(config.training.dataset)
        and not config.data.all_logits
        and isinstance(model_args, TransformerModelArgs)
        and model_args.attn_type == "sdpa"
        and parallelism.tensor_parallel_degree == parallelism.context_parallel_degree == 1
    )
