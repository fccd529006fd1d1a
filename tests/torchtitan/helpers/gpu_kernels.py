"""Norms and attention as GPUs have them: few operations, and few tensors kept for a backward.

A CPU computes an RMS norm by half a dozen operations. Under ``as_on_a_gpu`` a count of operations
on a CPU is about that of a GPU's kernels. Values are something else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    rms_norm = functional.rms_norm

    def norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: Any = None) -> Tensor:
        # A GPU has no kernel for two types either.
        is_fused = weight is not None and x.dtype == weight.dtype
        return _Norm.apply(x, weight) if is_fused else rms_norm(x, shape, weight, eps)

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return _Attention.apply(q, k, v)

    with (
        mock.patch.object(functional, "rms_norm", norm),
        mock.patch.object(functional, "scaled_dot_product_attention", attend),
    ):
        yield


class _Norm(Function):
    """One operation forward; backward one, and one for the gradient of its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1]))
        return x * weight

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        _, weight, _ = ctx.saved_tensors
        return dy * weight, torch.zeros_like(weight) if ctx.needs_input_grad[1] else None


class _Attention(Function):
    """One operation forward; three backward, one for each gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = torch.neg(q.transpose(1, 2)).transpose(1, 2)  # the heads of a token side by side
        ctx.save_for_backward(q, k, v, found, torch.empty(q.shape[:-1]))
        return found

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, k, v, _, _ = ctx.saved_tensors
        return torch.neg(dy), torch.zeros_like(k), torch.zeros_like(v)
