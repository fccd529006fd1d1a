"""Products accumulated in place, and autograd's view of linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from timelyfreeze.runtime.linear.groups import LinearGroup

if TYPE_CHECKING:
    from timelyfreeze.runtime.linear.layers import StageLinear
    from timelyfreeze.runtime.linear.stage_linears import StageLinears


def added(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``total``, 0 if None, plus left right in ``dtype``, in place.

    On CUDA a product of 16-bit factors is accumulated in float32: 8 bytes are moved per element
    instead of 20 by a product, its cast and a sum.
    """
    mixed = left.is_cuda and left.dtype != dtype
    if total is None:
        if mixed:
            return torch.mm(left, right, out_dtype=dtype)
        return (left @ right).to(dtype)
    if total.dtype == left.dtype:
        return total.addmm_(left, right)
    if mixed:
        return torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    return total.add_(left @ right)


def in_subspace(dy: Tensor, kept: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of dW in a subspace: (X Q)^T dY or (dY Q)^T X, by ``kept``.

    ``kept`` is X Q, or the wider X.
    """
    if kept.shape[1] == basis.shape[1]:
        return kept.t(), dy  # up to half the time of its transpose
    return (dy @ basis).t(), kept


class Product(Function):  # type: ignore[misc]
    """The outputs of a group in 16 bits; its backward fills the weights' gradients.

    The weights are no inputs of the graph, which would add up their gradients one by one.
    ``anchor`` stands for them, without a gradient, so that a backward with given inputs runs this
    node.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, linears: StageLinears, group: LinearGroup
    ) -> Any:
        """Return the outputs side by side, [..., d_out]."""
        y, kept, ctx.plan = linears.begin(group, x)
        ctx.save_for_backward(kept)
        ctx.linears, ctx.group, ctx.shape, ctx.dtype = linears, group, x.shape, x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None]:
        """Return the gradient of x; weights get theirs by ``linears``."""
        (kept,) = ctx.saved_tensors
        dy = dy.reshape(-1, dy.shape[-1])
        ctx.linears.end(ctx.group, dy, kept, ctx.plan)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = (dy @ ctx.linears.working(ctx.group)).view(ctx.shape).to(ctx.dtype)
        return dx, None, None, None


class ExactProduct(Function):  # type: ignore[misc]
    """x W^T by a copy of W in 16 bits, with the gradient for W itself, for compiled graphs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, copy: Tensor) -> Tensor:
        """Return x W^T, in the type of the copy."""
        ctx.save_for_backward(x, copy)
        ctx.dtype = weight.dtype
        return functional.linear(x, copy)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of x and of W, the latter in the type of W."""
        x, copy = ctx.saved_tensors
        left, right = dy.reshape(-1, dy.shape[-1]).t(), x.reshape(-1, x.shape[-1])
        return dy @ copy, added(None, left, right, ctx.dtype), None


class Take(Function):  # type: ignore[misc]
    """The identity, with a backward handing the output's gradient to its subspace.

    A separate node, so that the layer's product stays torch's, without a weight gradient to compute
    or an input to keep.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        kept: Tensor,
        linears: StageLinears,
        layer: StageLinear,
        microbatch: int,
    ) -> Tensor:
        """Return y; ``kept`` is X Q, or X."""
        ctx.save_for_backward(kept)
        ctx.linears, ctx.layer, ctx.microbatch = linears, layer, microbatch
        ctx.mark_dirty(y)  # no view of it: a split backward detaches what a stage sends in place
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Return the gradient unchanged."""
        (kept,) = ctx.saved_tensors
        ctx.linears.take(ctx.layer, dy.reshape(-1, dy.shape[-1]), kept, ctx.microbatch)
        return dy, None, None, None, None


class Sum(Function):  # type: ignore[misc]
    """The identity, with a backward giving the product in the subspace to a leaf.

    Without side effects, as required in a compiled graph; the leaf adds up float32.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, kept: Tensor, basis: Tensor, leaf: Tensor) -> Tensor:
        """Return y; ``kept`` is X Q, or X."""
        ctx.save_for_backward(kept, basis)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, Tensor]:
        """Return the gradient unchanged, and the product for the leaf."""
        kept, basis = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        left, right = in_subspace(rows, kept, basis.to(rows.dtype))
        return dy, None, None, added(None, left, right, torch.float32)
