"""The subspaces in which a stage's frozen weights learn, and a batch's sums in them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from timelyfreeze.runtime.linear.copies import Copies
from timelyfreeze.runtime.linear.groups import LinearGroup
from timelyfreeze.runtime.linear.layers import StageLinear
from timelyfreeze.runtime.linear.products import added, in_subspace
from timelyfreeze.settings import key


class FrozenSums:
    """Sums over the frozen microbatches of a batch, float32: (X Q)^T dY or (dY Q)^T X of a group.

    Layers inside of compiled graphs, ``compiled``, sum up in leaves of their own. ``timed_update``
    makes the context of turns and measurements of subspaces.
    """

    def __init__(
        self, groups: Sequence[LinearGroup], compiled: Sequence[StageLinear], copies: Copies
    ) -> None:
        self.groups, self._compiled, self._copies = list(groups), list(compiled), copies
        self.dimension = self._first_dimension = 0  # 0: frozen weights learn nothing
        self.bases: dict[str, Tensor] = {}  # Q by the name of a group
        self._sums: dict[str, Tensor] = {}
        self.timed_update: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights of all layers by name, as the optimizer has them."""
        return {name: w for g in self.groups for name, w in zip(g.names, g.weights, strict=True)}

    def learn_frozen(self, dimension: int, first: Callable[[LinearGroup, int], Tensor]) -> None:
        """Let frozen weights learn in subspaces of a dimension, ``first`` to begin with.

        To be called once parallelisms are applied and weights are on their device.
        """
        self._first_dimension = dimension
        for group in self.groups:
            group.weights = tuple(layer.weight for layer in group.layers)
        self.bases = {group.name: first(group, dimension) for group in self.groups}
        self.truncate(dimension)

    def truncate(self, dimension: int) -> None:
        """Keep the first ``dimension`` directions of all subspaces."""
        self.dimension = dimension
        self.bases = {name: basis[:, :dimension].contiguous() for name, basis in self.bases.items()}
        for layer in self._compiled:
            layer.learns_frozen, layer.basis = True, self.bases[layer.group.name]
            width = layer.out_features if layer.group.of_inputs else layer.in_features
            shape = self.bases[layer.group.name].shape[1], width
            layer.leaf = torch.zeros(shape, device=layer.weight.device, requires_grad=True)

    def load(self, bases: Mapping[str, Tensor | None]) -> None:
        """Go on with the subspaces of a checkpoint, by the name of the group."""
        for name, basis in bases.items():
            dimension = min(self._first_dimension, len(self.bases[name]))
            saved = 0 if basis is None else basis.shape[1]
            if basis is None or saved != dimension:
                raise ValueError(
                    f"the checkpoint has a subspace of dimension {saved} for {name}; this run has "
                    f"{key('gradient_rank')} {self._first_dimension}, which makes {dimension} "
                    "here; resume with the dimension that it was saved with"
                )
            self.bases[name] = basis[:, : self.dimension].to(self.bases[name]).contiguous()

    def basis(self, group: LinearGroup, dtype: torch.dtype) -> Tensor:
        """Return Q in a type."""
        return self._copies.cast(f"Q of {group.name}", self.bases[group.name], dtype)

    def projected(self, group: LinearGroup, x: Tensor) -> Tensor:
        """Return X Q, or X where directions are of outputs."""
        rows = x.reshape(-1, x.shape[-1])
        return rows @ self.basis(group, rows.dtype) if group.of_inputs else rows

    def add(self, group: LinearGroup, columns: slice, dy: Tensor, kept: Tensor) -> None:
        """Add a microbatch's part of the outputs ``columns``; ``kept`` is as ``projected``."""
        left, right = in_subspace(dy, kept, self.basis(group, dy.dtype))
        if columns == slice(0, group.d_out):
            known = self._sums.get(group.name)
            self._sums[group.name] = added(known, left, right, torch.float32)
        else:
            self._sum_of(group, columns).add_(left @ right)

    def _sum_of(self, group: LinearGroup, columns: slice) -> Tensor:
        """Return the place of a layer's sum, [k, its width], or of a single one's, [k, d]."""
        if group.name not in self._sums:
            basis, longer = self.bases[group.name], group.d_out if group.of_inputs else group.d_in
            self._sums[group.name] = basis.new_zeros((basis.shape[1], longer))
        total = self._sums[group.name]
        return total[:, columns] if group.of_inputs else total

    def add_to_gradients(self) -> None:
        """Add the sums to the gradients of the weights, after the last backward.

        One product for all microbatches, before a schedule divides or reduces gradients. Under FSDP
        gradients belong to gathered weights until reduced.
        """
        for layer in self._compiled if self.dimension else ():
            if layer.leaf.grad is not None:
                columns = layer.group.columns_of(layer.name)
                self._sum_of(layer.group, columns).add_(layer.leaf.grad)
        for group in self.groups:
            if group.name not in self._sums:
                continue
            basis, total = self.bases[group.name], self._sums[group.name]
            for layer, columns in zip(group.layers, group.columns, strict=True):
                left, right = basis, total
                if group.of_inputs:
                    left, right = total[:, columns].t(), basis.t()
                weight = layer.weight
                if weight.grad is not None and weight.grad.dtype == total.dtype:
                    weight.grad.addmm_(left, right)  # a third of the time of a product and its sum
                    continue
                part = (left @ right).to(weight.dtype)
                weight.grad = part if weight.grad is None else weight.grad.add_(part)
        self._sums.clear()

    def forget(self) -> None:
        """Let go of the sums of a batch."""
        self._sums.clear()
        for layer in self._compiled if self.dimension else ():
            layer.leaf.grad = None
