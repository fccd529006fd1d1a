"""torch's kernel for documents on the CPU, which has none: document by document in plain torch."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

from torchtitan.hf import decoder

CALLS: list[tuple[int, ...]] = []  # the heads of queries and of keys, and the number of documents


def _weights(queries: Tensor, keys: Tensor) -> Tensor:
    """What a query of one document, [n, heads, d], takes of those not behind: [heads, n, n]."""
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) / queries.shape[2] ** 0.5
    seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
    return F.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)


def _alone(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    values = values.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    return torch.einsum("hqk,khd->qhd", _weights(queries, keys), values)


def _alone_backward(
    grad: Tensor, queries: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of one document by hand: kernels run below autograd."""
    heads = queries.shape[1] // keys.shape[1]
    weights, scale = _weights(queries, keys), queries.shape[2] ** -0.5
    of_weights = torch.einsum("qhd,khd->hqk", grad, values.repeat_interleave(heads, dim=1))
    of_scores = weights * (of_weights - (of_weights * weights).sum(dim=-1, keepdim=True)) * scale
    of_queries = torch.einsum("hqk,khd->qhd", of_scores, keys.repeat_interleave(heads, dim=1))
    of_keys = torch.einsum("hqk,qhd->khd", of_scores, queries)
    of_values = torch.einsum("hqk,qhd->khd", weights, grad)
    return of_queries, *(g.unflatten(1, (-1, heads)).sum(dim=2) for g in (of_keys, of_values))


def _spans(bounds: list[int]) -> list[slice]:
    return [slice(*ends) for ends in itertools.pairwise(bounds) if ends[1] > ends[0]]


def _checked(bounds: Tensor, n_tokens: int, most: int, window: Any) -> list[int]:
    assert bounds.dtype == torch.int32
    ends = bounds.tolist()
    lengths = [end - start for start, end in itertools.pairwise(ends)]
    assert ends[0] == 0
    assert ends[-1] == n_tokens
    assert 0 <= min(lengths) <= max(lengths) <= most
    assert list(window) == [-1, 0]
    return ends


@varlen._varlen_attn.register_kernel("cpu")
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Any = None,
    *more: Any,
    **named: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    assert is_causal
    assert scale is None
    assert max_q == max_k
    assert torch.equal(cu_seq_q, cu_seq_k)
    CALLS.append((query.shape[1], key.shape[1], len(cu_seq_q) - 1))
    ends = _checked(cu_seq_q, len(query), max_q, window_size)
    return (
        torch.cat([_alone(query[s], key[s], value[s]) for s in _spans(ends)]),
        torch.zeros(query.shape[1], len(query)),
        torch.zeros(2, dtype=torch.uint64),
    )


@varlen._varlen_attn_backward.register_kernel("cpu")
def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *rest: Any, **_: Any
) -> tuple[Tensor, ...]:
    parts = (grad_out, query, key, value)
    found = [_alone_backward(*(part[s] for part in parts)) for s in _spans(rest[1].tolist())]
    return tuple(map(torch.cat, zip(*found, strict=True)))


@contextmanager
def kernel_on_the_cpu(*dtypes: torch.dtype) -> Iterator[None]:
    """Have decoders find the kernel on the CPU too, for numbers of these types."""
    CALLS.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "has_document_kernel", lambda device, head_dim: True)
        if dtypes:
            patch.setattr(decoder, "_KERNEL_DTYPES", dtypes)
        yield
