"""Linear layers whose frozen microbatches still give a gradient, in a subspace."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.autograd import Function
from torch.nn import functional

from timelyfreeze.runtime.entering.stage import EnteringStage
from timelyfreeze.runtime.low_rank.subspace import first_basis, is_of_inputs
from timelyfreeze.settings import key


class LowRankLayers:
    """What the linear layers of a stage share: who is frozen now, and what lies in each subspace.

    One thread runs one action of a stage at a time, so layers read here what the stage has set.
    Sums are float32, over the frozen microbatches of a batch. ``turned_in`` makes what their
    subspaces are turned and measured in, so that the time of it can be told. ``without_chain`` are
    weights of layers whose input needs no gradient, so that no gradient of their output comes by:
    they stay exact. Inside a compiled block nothing is read here: a graph is to serve all blocks
    that are alike, so it knows a layer's tensors alone (see ``LowRankLinear._compiled``).
    """

    def __init__(
        self, named: Mapping[str, Tensor], module: nn.Module, *, rank: int, seed: int
    ) -> None:
        names = {id(weight): name for name, weight in named.items()}
        # weights that may be frozen, as the optimizer has them; under FSDP a layer computes with a
        # gathered one instead
        self.weights: dict[str, Tensor] = {}
        self._layers: dict[str, nn.Linear] = {}
        self._rank, self._first_rank = rank, rank
        for layer in module.modules():
            # A subclass, as for float8, may compute something else than x W^T.
            is_plain = type(layer).forward in (nn.Linear.forward, LowRankLinear.forward)
            if isinstance(layer, nn.Linear) and is_plain and id(layer.weight) in names:
                name = names[id(layer.weight)]
                if not isinstance(layer, LowRankLinear):
                    layer.__class__ = _low_rank_class(type(layer))  # type: ignore[arg-type]
                layer.low_rank, layer.low_rank_name = self, name
                self.weights[name], self._layers[name] = layer.weight, layer
        self.bases = {n: first_basis(w, rank, seed, n) for n, w in self.weights.items()}
        self._compiled = _compiled_layers(module, rank)
        self.keep(rank)
        self._sums: dict[str, Tensor] = {}
        self._casts: dict[tuple[str, bool, torch.dtype], Tensor] = {}
        self.without_chain: set[str] = set()
        self.turned_in: Callable[[], AbstractContextManager[object]] = nullcontext
        self.frozen: Collection[str] = ()  # weights that the microbatch at hand freezes
        self._microbatch = -1
        self._postponed: dict[int, list[tuple[str, Tensor, Tensor]]] = {}
        self._postpones = False

    def keep(self, rank: int) -> None:
        """Keep the first ``rank`` directions of each subspace."""
        self._rank = rank
        self.bases = {name: basis[:, :rank].contiguous() for name, basis in self.bases.items()}
        for layer in self._compiled:
            shape = self.bases[layer.low_rank_name].shape[1], max(layer.weight.shape)
            layer.low_rank_leaf = torch.zeros(shape, device=layer.weight.device, requires_grad=True)

    def leaves(self) -> list[Tensor]:
        """Return what a backward has to lead to, besides live tensors, in compiled blocks."""
        return [each.low_rank_leaf for each in self._compiled if each.low_rank_name in self.frozen]

    def load(self, bases: Mapping[str, Tensor | None]) -> None:
        """Go on with the subspaces of a checkpoint, by name."""
        for name, basis in bases.items():
            rank = min(self._first_rank, len(self.bases[name]))
            saved = 0 if basis is None else basis.shape[1]
            if basis is None or saved != rank:
                raise ValueError(
                    f"the checkpoint has a subspace of rank {saved} for {name}; this run has "
                    f"{key('gradient_rank')} {self._first_rank}, which makes {rank} here; resume "
                    f"with the rank that it was saved with"
                )
            self.bases[name] = basis[:, : self._rank].to(self.bases[name]).contiguous()

    # -- actions -----------------------------------------------------------------------------------

    @contextmanager
    def action_of(
        self, microbatch: int, frozen: Collection[str], *, postpones: bool = False
    ) -> Iterator[None]:
        """Run an action of a microbatch that leaves out the exact gradients of ``frozen`` weights.

        A backward may run forwards too, of what is recomputed. The input half of a split one
        ``postpones`` products, which wait for :meth:`catch_up`.
        """
        self._microbatch, self.frozen, self._postpones = microbatch, frozen, postpones
        for layer in self._compiled:
            layer.low_rank_basis = self.bases[layer.low_rank_name]
        try:
            yield
        finally:
            self.frozen, self._postpones = (), False

    def catch_up(self, microbatch: int) -> None:
        """Do the products that the input half of a microbatch's backward has put off."""
        for name, dy, kept in self._postponed.pop(microbatch, ()):
            self._add(name, dy, kept)

    def take(self, microbatch: int, name: str, dy: Tensor, kept: Tensor) -> None:
        """Take the gradient of a frozen layer's output; ``kept`` is X Q, or X."""
        if self._postpones:
            self._postponed.setdefault(microbatch, []).append((name, dy, kept))
        else:
            self._add(name, dy, kept)

    def _add(self, name: str, dy: Tensor, kept: Tensor) -> None:
        self._sum_up(name, _product(dy, kept, self.basis(name, dy.dtype)))

    def _sum_up(self, name: str, product: Tensor) -> None:
        known = self._sums.get(name)
        self._sums[name] = product.float() if known is None else known.add_(product)

    # -- a batch's end -----------------------------------------------------------------------------

    def add_to_gradients(self) -> None:
        """Add what lies in the subspaces to the gradients of the weights, after the last backward.

        One product for all microbatches, before a schedule divides or reduces gradients. Under FSDP
        the gradients are those of gathered weights, until they are reduced.
        """
        for layer in self._compiled:
            if layer.low_rank_leaf.grad is not None:
                self._sum_up(layer.low_rank_name, layer.low_rank_leaf.grad)
        for name, total in self._sums.items():
            weight, basis = self._layers[name].weight, self.bases[name]
            left, right = (total.t(), basis.t()) if is_of_inputs(weight) else (basis, total)
            if weight.grad is not None and weight.grad.dtype == total.dtype:
                weight.grad.addmm_(left, right)  # a third of the time of a product and its sum
                continue
            part = (left @ right).to(weight.dtype)
            weight.grad = part if weight.grad is None else weight.grad.add_(part)
        self._sums.clear()

    def end_batch(self) -> None:
        """Let go of what was kept for the batch, whose weights are about to change."""
        self._sums.clear()
        self._casts.clear()
        self._postponed.clear()
        for layer in self._compiled:
            layer.low_rank_leaf.grad = None

    # -- layers ------------------------------------------------------------------------------------

    def basis(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return Q in a type, cast once for all microbatches of a batch."""
        return self._cast(name, self.bases[name], dtype, is_basis=True)

    def weight(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return W outside of the graph in a type, cast once for all microbatches of a batch."""
        return self._cast(name, self._layers[name].weight.detach(), dtype, is_basis=False)

    def _cast(self, name: str, tensor: Tensor, dtype: torch.dtype, *, is_basis: bool) -> Tensor:
        if tensor.dtype == dtype:
            return tensor
        which = (name, is_basis, dtype)
        if which not in self._casts:
            self._casts[which] = tensor.to(dtype)
        return self._casts[which]

    def attach(self, name: str, y: Tensor, x: Tensor) -> Tensor:
        """Return ``y``, with a node in its graph that takes the gradient in the subspace."""
        rows = x.detach().reshape(-1, x.shape[-1])
        if is_of_inputs(self.weights[name]):
            rows = rows @ self.basis(name, rows.dtype)
        return _Take.apply(y, rows, self, name, self._microbatch)


class LowRankLinear(nn.Linear):  # type: ignore[misc]
    """A linear layer that a :class:`LowRankLayers` has adopted."""

    low_rank: LowRankLayers
    low_rank_name: str
    low_rank_basis: Tensor
    low_rank_leaf: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b, as the base class does."""
        if torch.compiler.is_compiling():
            return self._compiled(x)
        layers, name = self.low_rank, self.low_rank_name
        if name not in layers.frozen or not torch.is_grad_enabled():
            return super().forward(x)
        if not x.requires_grad:
            layers.without_chain.add(name)
            return super().forward(x)
        device, dtype = x.device.type, self.weight.dtype
        bias = self.bias
        if torch.is_autocast_enabled(device):
            # Autocast casts what requires no gradient again for each microbatch.
            dtype = torch.get_autocast_dtype(device)
            x = x.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        return layers.attach(name, functional.linear(x, layers.weight(name, dtype), bias), x)

    def _compiled(self, x: Tensor) -> Tensor:
        """Return x W^T + b, in a graph that has the weight's gradient, or that of the leaf."""
        y = super().forward(x)
        if self.weight.requires_grad or not torch.is_grad_enabled():
            return y
        rows = x.detach().to(y.dtype).reshape(-1, x.shape[-1])  # under autocast x may be longer
        if is_of_inputs(self.weight):
            rows = rows @ self.low_rank_basis.to(rows.dtype)
        return _Sum.apply(y, rows, self.low_rank_basis, self.low_rank_leaf)


def _compiled_layers(module: nn.Module, rank: int) -> list[LowRankLinear]:
    """Return the adopted layers inside of compiled blocks."""
    if any(part._compiled_call_impl is not None for part in module.modules()):
        raise ValueError(
            f"a part of the stage was compiled in place, by Module.compile(); with "
            f"{key('gradient_rank')} {rank} it must be what torch.compile(part) returns"
        )
    blocks = (block for block in module.modules() if isinstance(block, OptimizedModule))
    inside = (layer for block in blocks for layer in block.modules())
    return [layer for layer in inside if isinstance(layer, LowRankLinear)]


class _Take(Function):  # type: ignore[misc]
    """The identity, whose backward hands the gradient of a layer's output to its subspace.

    A node of its own, so that the layer's product stays torch's: it has no weight to compute a
    gradient for, and keeps no input.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, kept: Tensor, layers: LowRankLayers, name: str, microbatch: int
    ) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.layers, ctx.name, ctx.microbatch = layers, name, microbatch
        ctx.mark_dirty(y)  # no view of it: a split backward detaches what a stage sends in place
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        (kept,) = ctx.saved_tensors
        ctx.layers.take(ctx.microbatch, ctx.name, dy.reshape(-1, dy.shape[-1]), kept)
        return dy, None, None, None, None


class _Sum(Function):  # type: ignore[misc]
    """The identity, whose backward gives the product in the subspace to a leaf.

    It has no effect beside its outputs, as a compiled graph must not; the leaf adds up float32.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, kept: Tensor, basis: Tensor, leaf: Tensor) -> Tensor:
        ctx.save_for_backward(kept, basis)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, Tensor]:
        kept, basis = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        return dy, None, None, _product(rows, kept, basis.to(rows.dtype)).float()


def _product(dy: Tensor, kept: Tensor, basis: Tensor) -> Tensor:
    """Return dW in the subspace: (X Q)^T dY or (dY Q)^T X, as ``kept``, which is X Q or X, says."""
    if kept.shape[1] == basis.shape[1]:  # X is wider than Q
        return kept.t() @ dy  # up to half the time of its transpose
    return (dy @ basis).t() @ kept


@cache
def _low_rank_class(kind: Any) -> type[LowRankLinear]:
    """Return the class of an adopted layer, which may be one that somebody has derived."""
    if kind is nn.Linear:
        return LowRankLinear
    made: type[LowRankLinear] = type(f"LowRank{kind.__name__}", (LowRankLinear, kind), {})
    return made


class LowRankStage(EnteringStage):
    """Pipeline stage that keeps a subspace for each linear weight, if it was prepared for it.

    Only those weights can be frozen then: norms, biases and embeddings cost little and have no
    product that a subspace would make cheaper.
    """

    low_rank: LowRankLayers | None = None
    parameter_names: tuple[str, ...]
    _masks: Mapping[int, NDArray[np.bool_]]

    def _low_rank_action(
        self, microbatch: int, *, postpones: bool = False
    ) -> AbstractContextManager[None]:
        """Return what an action runs in, so that layers know whether they are frozen."""
        mask = self._masks.get(microbatch) if self._active else None
        if self.low_rank is None or mask is None:
            return nullcontext()
        frozen = {n for n, is_frozen in zip(self.parameter_names, mask, strict=True) if is_frozen}
        return self.low_rank.action_of(microbatch, frozen, postpones=postpones)

    def _masked(self, microbatch: int) -> NDArray[np.bool_] | None:
        """Return what a microbatch freezes, but for weights that no subspace reaches."""
        mask = self._masks.get(microbatch)
        if mask is None or self.low_rank is None or not self.low_rank.without_chain:
            return mask
        return mask & [name not in self.low_rank.without_chain for name in self.parameter_names]
