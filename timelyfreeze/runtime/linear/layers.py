"""The module in place of a linear layer of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from timelyfreeze.runtime.linear.adapters import AdapterGroup
from timelyfreeze.runtime.linear.groups import LinearGroup
from timelyfreeze.runtime.linear.products import ExactProduct, Sum

if TYPE_CHECKING:
    from timelyfreeze.runtime.linear.stage_linears import StageLinears


class StageLinear(nn.Linear):  # type: ignore[misc]
    """A linear layer adopted by a :class:`StageLinears`.

    A compiled graph serves all blocks alike, so a layer inside reads its own tensors alone:
    ``copy``, its weight in 16 bits, or None for torch's own product; with a subspace ``basis`` and
    ``leaf``, for the product in the subspace.
    """

    linears: StageLinears
    name: str  # of the weight
    group: LinearGroup
    alone: LinearGroup  # of this layer by itself
    copy: Tensor | None
    learns_frozen: bool
    basis: Tensor
    leaf: Tensor

    def adopt(self, linears: StageLinears, name: str, group: LinearGroup) -> None:
        """Compute for ``linears`` from now on, in this group."""
        self.linears, self.name, self.group = linears, name, group
        self.alone = group if group.layers == (self,) else LinearGroup([self], [name])
        self.copy, self.learns_frozen = None, False

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b, as the base class does."""
        if torch.compiler.is_compiling():
            return self._compiled(x)
        linears = self.linears
        if linears.dtype is not None:
            return linears.output(self.alone, x)
        if self.group.name not in linears.frozen_groups or not torch.is_grad_enabled():
            return super().forward(x)
        if not x.requires_grad:
            linears.without_chain.update(self.group.names)
            return super().forward(x)
        device, dtype = x.device.type, self.weight.dtype
        bias = self.bias
        if torch.is_autocast_enabled(device):
            # Autocast casts what requires no gradient again for each microbatch.
            dtype = torch.get_autocast_dtype(device)
            x = x.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        return linears.attach(self, functional.linear(x, linears.weight(self, dtype), bias), x)

    def _compiled(self, x: Tensor) -> Tensor:
        """Return x W^T + b, in a graph with the gradient of weight or leaf."""
        is_exact = self.weight.requires_grad or not torch.is_grad_enabled()
        if self.copy is None:
            y = super().forward(x)
        else:
            x = x.to(self.copy.dtype)
            if is_exact:
                y = ExactProduct.apply(x, self.weight, self.copy)
            else:
                y = functional.linear(x, self.copy)
            y = y if self.bias is None else y + self.bias.to(y.dtype)
        if is_exact or not self.learns_frozen:
            return y
        rows = x.detach().to(y.dtype).reshape(-1, x.shape[-1])  # under autocast x may be longer
        if self.basis.shape[0] == rows.shape[1]:
            rows = rows @ self.basis.to(rows.dtype)
        return Sum.apply(y, rows, self.basis, self.leaf)


def joined_output(layers: Sequence[nn.Linear], x: Tensor) -> Tensor | None:
    """Return layers' outputs side by side, by one product; None for separate products."""
    group: LinearGroup | AdapterGroup | None = getattr(layers[0], "group", None)
    if group is None or group.layers != tuple(layers) or torch.compiler.is_compiling():
        return None
    linears: StageLinears = layers[0].linears
    return None if linears.dtype is None else linears.output(group, x)


@cache
def stage_linear_class(kind: Any) -> type[StageLinear]:
    """Return the class of an adopted layer, possibly derived by others."""
    if kind is nn.Linear:
        return StageLinear
    made: type[StageLinear] = type(f"Stage{kind.__name__}", (StageLinear, kind), {})
    return made
