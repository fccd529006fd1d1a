"""Adapters of low rank beside frozen linear layers, computed with them; see ``torchtitan.lora``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from timelyfreeze.runtime.linear.groups import declared_groups
from timelyfreeze.runtime.linear.products import added

if TYPE_CHECKING:
    from timelyfreeze.runtime.linear.stage_linears import StageLinears

PLACE = "stage_adapter"  # attribute of a layer with an adapter


@dataclass(frozen=True)
class Adapter:
    """A frozen layer x W^T + b, and scale x A^T B^T beside it: A [r, d_in], B [d_out, r]."""

    base: nn.Linear  # has W, in the type of products
    down: nn.Linear  # has A
    up: nn.Linear  # has B
    scale: float


class AdapterGroup:
    """Layers of a common input with adapters, joined to a single adapter of all their ranks.

    A has those of the layers below each other, [k, d_in]; B has theirs on its diagonal, [d_out, k].
    """

    def __init__(self, layers: Sequence[nn.Module], linears: StageLinears, name: str) -> None:
        self.layers, self.linears, self.name = tuple(layers), linears, name
        self.adapters: list[Adapter] = [getattr(layer, PLACE) for layer in layers]
        self.columns = _slices([a.base.out_features for a in self.adapters])
        self.ranks = _slices([a.down.out_features for a in self.adapters])
        self._sums: tuple[Tensor, Tensor] | None = None  # of A and of B, float32

    def copies(self) -> tuple[Tensor, Tensor]:
        """Return A and scale B of the group in the type of products."""
        dtype, k = self.linears.dtype, self.ranks[-1].stop
        first = self.adapters[0].down.weight
        down = first.new_empty((k, first.shape[1]), dtype=dtype)
        up = first.new_zeros((self.columns[-1].stop, k), dtype=dtype)
        for adapter, columns, ranks in self._parts():
            down[ranks].copy_(adapter.down.weight.detach())
            up[columns, ranks].copy_(adapter.up.weight.detach() * adapter.scale)
        return down, up

    def _parts(self) -> list[tuple[Adapter, slice, slice]]:
        return list(zip(self.adapters, self.columns, self.ranks, strict=True))

    def outputs(self, x: Tensor, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of x side by side, [..., d_out], and x A^T, [N, k]."""
        rows = x.reshape(-1, x.shape[-1])
        inner, made = rows @ down.t(), x.new_empty((*x.shape[:-1], self.columns[-1].stop))
        y = made.view(len(rows), -1)
        for adapter, columns, _ in self._parts():
            torch.mm(rows, adapter.base.weight.t(), out=y[:, columns])
            if adapter.base.bias is not None:
                y[:, columns] += adapter.base.bias
        y.addmm_(inner, up.t())
        return made, inner

    def input_gradient(self, dy: Tensor, inner: Tensor, down: Tensor) -> Tensor:
        """Return the gradient of the rows; ``inner`` is the gradient of x A^T."""
        dx = inner @ down
        for adapter, columns, _ in self._parts():
            dx.addmm_(dy[:, columns], adapter.base.weight)
        return dx

    def add(self, rows: Tensor, inner: Tensor, dy: Tensor, d_inner: Tensor) -> None:
        """Add a microbatch to the gradients of A and B."""
        of_down, of_up = self._sums or (None, None)
        self._sums = (
            added(of_down, d_inner.t(), rows, torch.float32),
            added(of_up, dy.t(), inner, torch.float32),
        )

    def add_to_gradients(self) -> None:
        """Add a batch's gradients to A and B."""
        if self._sums is None:
            return
        of_down, of_up = self._sums
        for adapter, columns, ranks in self._parts():
            pairs = (adapter.down, of_down[ranks]), (adapter.up, of_up[columns, ranks])
            for layer, part in pairs:
                part = part * (adapter.scale if layer is adapter.up else 1.0)
                weight, gradient = layer.weight, part.to(layer.weight.dtype)
                weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        self._sums = None

    def forget(self) -> None:
        """Drop a batch's sums."""
        self._sums = None


class AdapterProduct(Function):  # type: ignore[misc]
    """The outputs of a group; its backward adds to the gradients of A and B, as ``Product``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, group: AdapterGroup) -> Tensor:
        """Return the outputs side by side, [..., d_out]."""
        rows = x.to(group.linears.dtype)
        y, inner = group.outputs(rows, *group.linears.adapter_copies(group))
        ctx.save_for_backward(rows.reshape(-1, x.shape[-1]), inner)
        ctx.group, ctx.shape, ctx.dtype = group, x.shape, x.dtype
        ctx.microbatch = group.linears.microbatch
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None]:
        """Return the gradient of x."""
        (rows, inner), group = ctx.saved_tensors, ctx.group
        down, up = group.linears.adapter_copies(group)
        dy = dy.reshape(-1, dy.shape[-1])
        d_inner = dy @ up
        add = partial(group.add, rows, inner, dy, d_inner)
        group.linears.now_or_later(ctx.microbatch, add)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = group.input_gradient(dy, d_inner, down).view(ctx.shape).to(ctx.dtype)
        return dx, None, None


class StageAdapter(nn.Module):  # type: ignore[misc]
    """A layer with an adapter, adopted by a :class:`StageLinears`."""

    linears: StageLinears
    group: AdapterGroup
    alone: AdapterGroup  # of this layer by itself

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b + scale x A^T B^T."""
        if not torch.compiler.is_compiling():
            return self.linears.output(self.alone, x)
        adapter: Adapter = getattr(self, PLACE)
        dtype = adapter.base.weight.dtype
        x = x.to(dtype)
        y = functional.linear(x, adapter.base.weight, adapter.base.bias)
        inner = functional.linear(x, adapter.down.weight.to(dtype))
        return y + functional.linear(inner, adapter.up.weight.to(dtype)) * adapter.scale


@cache
def stage_adapter_class(kind: Any) -> type[StageAdapter]:
    """Return the class of an adopted layer with an adapter."""
    made: type[StageAdapter] = type(f"Stage{kind.__name__}", (StageAdapter, kind), {})
    return made


def adopt_adapters(module: nn.Module, linears: StageLinears) -> list[AdapterGroup]:
    """Have ``linears`` compute all layers of a stage with an adapter."""
    layers: list[Any] = [layer for layer in module.modules() if hasattr(layer, PLACE)]
    known = {id(layer) for layer in layers}
    groups: list[AdapterGroup] = []
    for together in declared_groups(module):
        if all(id(layer) in known for layer in together):
            groups.append(AdapterGroup(together, linears, f"adapters {len(groups)}"))
    for i, layer in enumerate(layers):
        kind: Any = type(layer)
        layer.__class__ = stage_adapter_class(kind)
        layer.linears, layer.alone = linears, AdapterGroup([layer], linears, f"adapter {i}")
        layer.group = layer.alone
    for group in groups:
        for layer in group.layers:
            layer.group = group
    return [*groups, *(layer.alone for layer in layers)]


def _slices(widths: Sequence[int]) -> list[slice]:
    ends = accumulate(widths)
    return [slice(end - width, end) for end, width in zip(ends, widths, strict=True)]
