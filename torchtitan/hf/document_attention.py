"""Attention within documents: the examples of a packed sequence do not see one another.

Upstream ends a document at every end token, which a conversation has after each of its answers, so
a turn would not see the turns before it. And its masks go with kernels that train on GPUs alone
(flex, varlen), while its positions run on through all documents. Here a document begins where
``positions`` is 0. That one tensor travels to every pipeline stage, split into microbatches like
the batch; rotary embeddings take it as it is, and the mask follows from it.

The mask is a plain tensor for torch's scaled dot product, so this works on the CPU and on any GPU.
It costs the full square of the sequence where a causal kernel computes half of it.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Attention, Transformer, apply_rotary_emb

from torchtitan.data.sequences import POSITIONS


def document_mask(positions: Tensor) -> Tensor:
    """Return which tokens see which: those before them in the same document, and themselves.

    ``positions``, int64 [B, T], count from 0 in each document. The mask is bool, [B, 1, T, T], True
    where the query (third dimension) sees the key (last).
    """
    documents = (positions == 0).cumsum(dim=1)
    same = documents[:, :, None] == documents[:, None, :]
    return same.tril().unsqueeze(1)


class DocumentAttention(Attention):
    """Upstream's attention, with the weights and names it has, under a mask if there is one."""

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of ``x``, each [B, T, heads, head_dim]."""
        by_head = (*x.shape[:2], -1, self.head_dim)
        return self.wq(x).view(by_head), self.wk(x).view(by_head), self.wv(x).view(by_head)

    def forward(
        self,
        x: Tensor,
        freqs_cis: Tensor,
        attention_masks: Tensor | None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Attend: from [B, T, dim] to the same shape, as upstream without masks."""
        queries, keys, values = self.heads(x)
        queries, keys = apply_rotary_emb(queries, keys, freqs_cis, positions)
        if attention_masks is not None:
            # Kernels that take a mask want as many heads of keys as of queries.
            keys = keys.repeat_interleave(self.n_rep, dim=2)
            values = values.repeat_interleave(self.n_rep, dim=2)
        by_head = [part.transpose(1, 2) for part in (queries, keys, values)]  # [B, heads, T, d]
        if attention_masks is None:
            attended = self.inner_attention(*by_head, enable_gqa=self.enable_gqa)
        else:
            attended = F.scaled_dot_product_attention(*by_head, attn_mask=attention_masks)
        return self.wo(attended.transpose(1, 2).flatten(2))


class DocumentTransformer(Transformer):
    """Upstream's llama3 for packed sequences; without ``positions`` it computes what that does."""

    attention_class = DocumentAttention

    def __init__(self, model_args: TransformerModelArgs) -> None:
        super().__init__(model_args)
        for layer in self.layers.values():
            layer.attention = self.attention_class(model_args)

    def forward(
        self, tokens: Tensor, attention_masks: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Compute logits of tokens, [B, T], or a stage's output; masked if packed."""
        if positions is not None and attention_masks is None:
            attention_masks = document_mask(positions)
        return super().forward(tokens, attention_masks, positions)


def attention_error(model_cls: type, flavor: str, model_args: Any) -> str | None:
    """Return why a model cannot read packed sequences, or None."""
    if model_cls is not Transformer:
        return (
            "data.packing is true, and model.name is not llama3, whose attention alone can be kept "
            "within examples; set it to false"
        )
    if model_args.attn_type != "sdpa":
        return (
            f"data.packing is true, and model.flavor {flavor!r} has attn_type "
            f"{model_args.attn_type!r}, which ends an example at every end token, also within a "
            "conversation; use a flavor with 'sdpa'"
        )
    return None


def conversation_error(flavor: str, model_args: Any) -> str | None:
    """Return why a model cannot read conversations, an example to a sequence, or None."""
    if getattr(model_args, "attn_mask_type", "causal") != "block_causal":
        return None
    return (
        f"training.dataset may have conversations, and model.flavor {flavor!r} (attn_type "
        f"{model_args.attn_type!r}) ends a document at every end token, so that a turn would not "
        "see those before it; use a flavor with 'sdpa'"
    )


def to_every_stage(
    extra_inputs: dict[str, Tensor], extra_kwargs: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Move ``positions`` from what the first pipeline stage gets to what all stages get."""
    first = dict(extra_inputs)
    every = {POSITIONS: first.pop(POSITIONS)} if POSITIONS in first else {}
    return first, extra_kwargs | every
