"""The linear layers of a stage as its actions see them: who is frozen, and where gradients go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.nn import functional

from timelyfreeze.runtime.linear.adapters import PLACE as ADAPTER
from timelyfreeze.runtime.linear.adapters import (
    AdapterGroup,
    AdapterProduct,
    stage_adapter_class,
)
from timelyfreeze.runtime.linear.groups import LinearGroup, declared_groups, linear_groups
from timelyfreeze.runtime.linear.layers import StageLinear, stage_linear_class
from timelyfreeze.runtime.linear.products import Product, Take, added, in_subspace
from timelyfreeze.settings import key

_PLACE = "stage_linears"  # attribute of a stage's module


class StageLinears:
    """What the linear layers of a stage share: masks of the action at hand, sums of the batch.

    One thread runs one action of a stage at a time, so layers read here what the stage has set.
    With a 16-bit ``dtype`` layers compute in it, from copies of weights that are made once a batch,
    and gradients are added to those of the weights here. Without one torch computes and adds up
    what is exact. Sums in subspaces are float32, over the frozen microbatches of a batch.
    ``timed_update`` makes the context in which subspaces are turned and measured. ``without_chain``
    are weights of layers whose input needs no gradient, so that no gradient of their output comes
    by: they stay exact.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype | None = None) -> None:
        # A subclass, as for float8, may compute something else than x W^T.
        forwards = (nn.Linear.forward, StageLinear.forward)
        adapted = [m for m in module.modules() if hasattr(m, ADAPTER)] if dtype else []
        parts = {id(part) for layer in adapted for part in layer.modules()}
        layers = [m for m in module.modules() if isinstance(m, nn.Linear) and id(m) not in parts]
        layers = [layer for layer in layers if type(layer).forward in forwards]
        self.dtype = dtype
        self.groups = linear_groups(module, layers)
        self._home = {name: group for group in self.groups for name in group.names}
        self._alone: dict[nn.Module, Any] = {}
        names = {id(p): name for group in self.groups for name, p in _named(group)}
        for layer in layers:
            if not isinstance(layer, StageLinear):
                layer.__class__ = stage_linear_class(type(layer))
            layer.linears, layer.group = self, self._home[names[id(layer.weight)]]
            layer.copy, layer.learns_frozen = None, False
            self._alone[layer] = LinearGroup([layer], [names[id(layer.weight)]])
        self._adapters = self._adopt_adapters(module, adapted)
        self._compiled = _inside_compiled(module)
        parts = list(module.modules())
        self._is_compiled_in_place = any(p._compiled_call_impl is not None for p in parts)
        self.rank = self._first_rank = 0
        self.bases: dict[str, Tensor] = {}  # Q by the name of a group
        self._sums: dict[str, Tensor] = {}
        self._casts: dict[str, Any] = {}
        self._anchors: dict[str, Tensor] = {}
        self._keeps = False
        self.without_chain: set[str] = set()
        self.timed_update: Callable[[], AbstractContextManager[object]] = nullcontext
        self.frozen: Collection[str] = ()  # weights and biases that the microbatch at hand freezes
        self.frozen_groups: Collection[str] = ()
        self.microbatch = -1
        self._postponed: dict[int, list[Callable[[], None]]] = {}
        self._postpones = False
        self.is_staged = False  # gradients count inside of actions alone
        self._acts = False
        # X, who reads it, and what they keep of it
        self._projected: tuple[Tensor, LinearGroup, Tensor] | None = None

    def _adopt_adapters(self, module: nn.Module, layers: Sequence[nn.Module]) -> list[AdapterGroup]:
        known, groups = {id(layer) for layer in layers}, []
        for together in declared_groups(module):
            if all(id(layer) in known for layer in together):
                groups.append(AdapterGroup(together, self, f"adapters {len(groups)}"))
        for layer in layers:
            layer.__class__ = stage_adapter_class(type(layer))
            group = AdapterGroup([layer], self, f"adapter {len(self._alone)}")
            layer.linears, layer.group, self._alone[layer] = self, group, group
        for group in groups:
            for layer in group.layers:
                layer.group = group
        return [*groups, *(self._alone[layer] for layer in layers)]

    # -- subspaces ---------------------------------------------------------------------------------

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights of all layers by name, as the optimizer has them."""
        return {name: w for g in self.groups for name, w in zip(g.names, g.weights, strict=True)}

    def learn_frozen(self, rank: int, first: Callable[[LinearGroup, int], Tensor]) -> None:
        """Have frozen weights learn in subspaces of ``rank`` directions, ``first`` to begin with.

        Call it when parallelisms are applied and weights are on their device.
        """
        if self._is_compiled_in_place:
            raise ValueError(
                f"a part of the stage was compiled in place, by Module.compile(); with "
                f"{key('gradient_rank')} {rank} it must be what torch.compile(part) returns"
            )
        self._first_rank = rank
        for group in self.groups:
            group.weights = tuple(layer.weight for layer in group.layers)
        self.bases = {group.name: first(group, rank) for group in self.groups}
        self.truncate(rank)

    def truncate(self, rank: int) -> None:
        """Keep the first ``rank`` directions of each subspace."""
        self.rank = rank
        self.bases = {name: basis[:, :rank].contiguous() for name, basis in self.bases.items()}
        for layer in self._compiled:
            layer.learns_frozen = True
            width = layer.out_features if layer.group.of_inputs else layer.in_features
            shape = self.bases[layer.group.name].shape[1], width
            layer.leaf = torch.zeros(shape, device=layer.weight.device, requires_grad=True)

    def load(self, bases: Mapping[str, Tensor | None]) -> None:
        """Go on with the subspaces of a checkpoint, by the name of the group."""
        for name, basis in bases.items():
            rank = min(self._first_rank, len(self.bases[name]))
            saved = 0 if basis is None else basis.shape[1]
            if basis is None or saved != rank:
                raise ValueError(
                    f"the checkpoint has a subspace of rank {saved} for {name}; this run has "
                    f"{key('gradient_rank')} {self._first_rank}, which makes {rank} here; resume "
                    f"with the rank that it was saved with"
                )
            self.bases[name] = basis[:, : self.rank].to(self.bases[name]).contiguous()

    # -- actions -----------------------------------------------------------------------------------

    @contextmanager
    def action_of(
        self, microbatch: int, frozen: Collection[str] = (), *, postpones: bool = False
    ) -> Iterator[None]:
        """Run an action of a microbatch that leaves out the exact gradients of ``frozen`` weights.

        A backward may run forwards too, of what is recomputed. The input half of a split one
        ``postpones`` products of weight gradients, which wait for :meth:`run_postponed`.
        """
        self.microbatch, self._postpones, self.frozen = microbatch, postpones, frozen
        self._acts = True
        if self.rank:
            self.frozen_groups = {self._home[name].name for name in frozen if name in self._home}
        for layer in self._compiled if self.rank else ():
            layer.basis = self.bases[layer.group.name]
        try:
            yield
        finally:
            self.frozen, self.frozen_groups, self._postpones = (), (), False
            self._acts = False
            self._projected = None

    def run_postponed(self, microbatch: int) -> None:
        """Do the products that the input half of a microbatch's backward has put off."""
        for add in self._postponed.pop(microbatch, ()):
            add()

    def targets(self) -> list[Tensor]:
        """Return what a backward has to lead to, besides live tensors of the graph."""
        leaves = [one.leaf for one in self._compiled if one.group.name in self.frozen_groups]
        for group in self.groups:
            if group.name in self._anchors and (self.rank or self._is_live(group)):
                leaves.append(self._anchors[group.name])
        return leaves + [self._anchors[g.name] for g in self._adapters if g.name in self._anchors]

    def _is_live(self, group: LinearGroup) -> bool:
        return any(name not in self.frozen for name in (*group.names, *_biases(group)))

    def now_or_later(self, microbatch: int, add: Callable[[], None]) -> None:
        """Add to gradients; in the input half of a split backward only when its other half runs."""
        if self.is_staged and not self._acts:
            return  # torch looks for the types of what stages send, by a backward of noise
        if self._postpones:
            self._postponed.setdefault(microbatch, []).append(add)
        else:
            add()

    # -- 16-bit products ---------------------------------------------------------------------------

    def output(self, group: LinearGroup | AdapterGroup, x: Tensor) -> Tensor:
        """Return the outputs of the layers of a group side by side, [..., d_out], in ``dtype``."""
        if group.name not in self._anchors:
            self._anchors[group.name] = torch.zeros((), device=x.device, requires_grad=True)
        anchor = self._anchors[group.name]
        if isinstance(group, AdapterGroup):
            return AdapterProduct.apply(x, anchor, group)
        if torch.is_grad_enabled():
            return Product.apply(x, anchor, self, group)
        bias = _bias(group, self.dtype)
        return functional.linear(x.to(self.dtype), self.working(group), bias)

    def _columns(self, layer: StageLinear) -> slice:
        return layer.group.columns_of(self._alone[layer].name)

    def alone(self, layer: nn.Module) -> Any:
        """Return the group of a layer that is called by itself, of its kind."""
        return self._alone[layer]

    def begin(self, group: LinearGroup, x: Tensor) -> tuple[Tensor, Tensor | None, Any]:
        """Return a group's outputs, what their gradient needs, and who is live; see ``Product``."""
        x = x.to(self.dtype)
        y = functional.linear(x, self.working(group), _bias(group, self.dtype))
        pairs = zip(group.names, group.layers, strict=True)
        live = [n for n, one in pairs if n not in self.frozen and one.weight.requires_grad]
        biases = [name for name in _biases(group) if name not in self.frozen]
        kept = None
        if live:
            kept = x.reshape(-1, x.shape[-1])
        elif self.rank:
            kept = self._kept(self._home[group.name], x)
        return y, kept, (self.microbatch, live, biases)

    def _kept(self, group: LinearGroup, x: Tensor) -> Tensor:
        """Return X Q, or X where directions are those of outputs."""
        rows = x.reshape(-1, x.shape[-1])
        return rows @ self._basis(group, rows.dtype) if group.of_inputs else rows

    def end(self, group: LinearGroup, dy: Tensor, kept: Tensor | None, plan: Any) -> None:
        """Take the gradient of a group's outputs, [N, d_out], now or in the weight half."""
        microbatch, live, biases = plan
        if live or biases:
            add = partial(self._add_exact, group, dy, kept, live, biases)
            self.now_or_later(microbatch, add)
        if not live and kept is not None:
            home = self._home[group.name]
            columns = slice(0, home.d_out) if home is group else home.columns_of(group.name)
            self.now_or_later(microbatch, partial(self._add_part, home, columns, dy, kept))

    @torch.no_grad()
    def _add_exact(
        self, group: LinearGroup, dy: Tensor, kept: Tensor, live: list[str], biases: list[str]
    ) -> None:
        for name, layer, columns in zip(group.names, group.layers, group.columns, strict=True):
            weight, bias = layer.weight, layer.bias
            if name in live:
                weight.grad = added(weight.grad, dy[:, columns].t(), kept, weight.dtype)
            if bias is not None and _bias_of(name) in biases:
                total = dy[:, columns].sum(dim=0, dtype=bias.dtype)
                bias.grad = total if bias.grad is None else bias.grad.add_(total)

    @torch.no_grad()
    def _add_part(self, group: LinearGroup, columns: slice, dy: Tensor, kept: Tensor) -> None:
        left, right = in_subspace(dy, kept, self._basis(group, dy.dtype))
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

    # -- torch's products --------------------------------------------------------------------------

    def attach(self, layer: StageLinear, y: Tensor, x: Tensor) -> Tensor:
        """Return ``y``, with a node in its graph that takes the gradient in the subspace."""
        known = self._projected
        if known is None or known[0] is not x or known[1] is not layer.group:
            known = self._projected = x, layer.group, self._kept(layer.group, x.detach())
        return Take.apply(y, known[2], self, layer, self.microbatch)

    def take(self, layer: StageLinear, dy: Tensor, kept: Tensor, microbatch: int) -> None:
        """Take the gradient of a frozen layer's output; ``kept`` is X Q, or X."""
        columns = self._columns(layer)
        self.now_or_later(microbatch, partial(self._add_part, layer.group, columns, dy, kept))

    # -- a batch's end -----------------------------------------------------------------------------

    def add_to_gradients(self) -> None:
        """Add sums of subspaces and of adapters to gradients, after the last backward.

        One product for all microbatches, before a schedule divides or reduces gradients. Under FSDP
        the gradients are those of gathered weights, until they are reduced.
        """
        for adapters in self._adapters:
            adapters.add_to_gradients()
        for layer in self._compiled if self.rank else ():
            if layer.leaf.grad is not None:
                columns = self._columns(layer)
                self._sum_of(layer.group, columns).add_(layer.leaf.grad)
        for group in self.groups:
            total, basis = self._sums.get(group.name), self.bases.get(group.name)
            if total is None or basis is None:
                continue
            for layer, columns in zip(group.layers, group.columns, strict=True):
                left, right = (
                    (total[:, columns].t(), basis.t()) if group.of_inputs else (basis, total)
                )
                weight = layer.weight
                if weight.grad is not None and weight.grad.dtype == total.dtype:
                    weight.grad.addmm_(left, right)  # a third of the time of a product and its sum
                    continue
                part = (left @ right).to(weight.dtype)
                weight.grad = part if weight.grad is None else weight.grad.add_(part)
        self._sums.clear()

    def end_batch(self) -> None:
        """Let go of the sums of a batch."""
        self._sums.clear()
        self._postponed.clear()
        for adapters in self._adapters:
            adapters.forget()
        if self.dtype is None:
            self._casts.clear()
        for layer in self._compiled if self.rank else ():
            layer.leaf.grad = None

    # -- copies ------------------------------------------------------------------------------------

    @contextmanager
    def copies_kept(self) -> Iterator[None]:
        """Keep copies of weights, which stay as they are inside; outside each forward makes its."""
        self._keeps = True
        try:
            yield
        finally:
            self._keeps = False
            self._casts.clear()
            for layer in self._compiled:
                layer.copy = None

    @contextmanager
    def forwarding(self) -> Iterator[None]:
        """Run the forward of the stage: compiled layers have their copies, from before graphs."""
        for layer in self._compiled if self.dtype is not None else ():
            if layer.copy is None:
                layer.copy = self.working(self.alone(layer))
        try:
            yield
        finally:
            for layer in () if self._keeps else self._compiled:
                layer.copy = None

    def working(self, group: LinearGroup) -> Tensor:
        """Return the weights of a group below each other, [d_out, d_in], in ``dtype``."""
        assert self.dtype is not None
        (first, *others) = (layer.weight.detach() for layer in group.layers)
        if not others:
            return self._cast(group.name, first, self.dtype)

        def join() -> Tensor:
            joined = first.new_empty((group.d_out, group.d_in), dtype=self.dtype)
            for columns, weight in zip(group.columns, (first, *others), strict=True):
                joined[columns].copy_(weight)
            return joined

        return self._kept_copy(f"{group.name} and others", join)

    def adapter_copies(self, group: AdapterGroup) -> tuple[Tensor, Tensor]:
        """Return A and B of a group of adapters in ``dtype``; see :class:`AdapterGroup`."""
        return self._kept_copy(group.name, group.copies)

    def weight(self, layer: StageLinear, dtype: torch.dtype) -> Tensor:
        """Return W outside of the graph in a type, cast once for all microbatches of a batch."""
        return self._cast(self.alone(layer).name, layer.weight.detach(), dtype)

    def _basis(self, group: LinearGroup, dtype: torch.dtype) -> Tensor:
        """Return Q in a type, cast once for all microbatches of a batch."""
        return self._cast(f"Q of {group.name}", self.bases[group.name], dtype)

    def _cast(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if tensor.dtype == dtype:
            return tensor
        return self._kept_copy(f"{name} {dtype}", lambda: tensor.to(dtype))

    def _kept_copy(self, name: str, make: Callable[[], Any]) -> Any:
        copy = self._casts.get(name)
        if copy is None:
            copy = make()
            if self._keeps or self.dtype is None:
                self._casts[name] = copy
        return copy


def linears_of(module: nn.Module) -> StageLinears | None:
    """Return what computes a stage's linear layers in 16 bits, if anything does."""
    return getattr(module, _PLACE, None)


def lean_linears(module: nn.Module, dtype: torch.dtype) -> StageLinears:
    """Have the linear layers of a stage compute in a 16-bit type; see :class:`StageLinears`.

    Weights may be on no device yet.
    """
    linears = StageLinears(module, dtype)
    setattr(module, _PLACE, linears)
    return linears


@contextmanager
def keep_copies(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Make copies of weights once for all microbatches of a batch, which runs inside."""
    with ExitStack() as stack:
        for linears in filter(None, map(linears_of, modules)):
            stack.enter_context(linears.copies_kept())
        yield


def _named(group: LinearGroup) -> Iterator[tuple[str, Tensor]]:
    yield from zip(group.names, group.weights, strict=True)


def _bias_of(name: str) -> str:
    return f"{name.removesuffix('weight')}bias"


def _biases(group: LinearGroup) -> list[str]:
    """Return the names of the biases of a group."""
    pairs = zip(group.names, group.layers, strict=True)
    return [_bias_of(name) for name, layer in pairs if layer.bias is not None]


def _bias(group: LinearGroup, dtype: torch.dtype | None) -> Tensor | None:
    if all(layer.bias is None for layer in group.layers):
        return None
    parts = [
        layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
        for layer in group.layers
    ]
    return torch.cat(parts).to(dtype)


def _inside_compiled(module: nn.Module) -> list[StageLinear]:
    """Return the adopted layers inside of compiled blocks."""
    blocks = (block for block in module.modules() if isinstance(block, OptimizedModule))
    inside = (layer for block in blocks for layer in block.modules())
    return [layer for layer in inside if isinstance(layer, StageLinear)]
