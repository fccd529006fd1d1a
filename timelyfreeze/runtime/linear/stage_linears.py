"""The linear layers of a stage as its actions see them: who is frozen, and where gradients go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.nn import functional

from timelyfreeze.runtime.linear.adapters import AdapterGroup, AdapterProduct, adopt_adapters
from timelyfreeze.runtime.linear.copies import Copies
from timelyfreeze.runtime.linear.frozen_sums import FrozenSums
from timelyfreeze.runtime.linear.groups import LinearGroup, linear_groups
from timelyfreeze.runtime.linear.layers import StageLinear, stage_linear_class
from timelyfreeze.runtime.linear.products import Product, Take, added
from timelyfreeze.settings import key

_PLACE = "stage_linears"  # attribute of a stage's module


class StageLinears(FrozenSums):
    """Shared state of a stage's linear layers: masks of the present action, sums of the batch.

    A stage runs a single action at a time, so layers read the stage's settings here. With a 16-bit
    ``dtype`` layers compute in this type, from copies of weights made once a batch, and gradients
    are added to the weights' here. Without it torch computes and adds up exact gradients.
    ``without_chain`` are weights of layers with an input that needs no gradient, and so without a
    gradient of the output in a chain: they stay exact.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self._adapters = adopt_adapters(module, self) if dtype is not None else []
        inside = {id(part) for g in self._adapters for one in g.layers for part in one.modules()}
        layers = [layer for layer in plain_linears(module) if id(layer) not in inside]
        if dtype is None:  # layers are adopted for what they learn alone
            layers = [layer for layer in layers if layer.weight.requires_grad]
        groups = linear_groups(module, layers)
        self._home = {name: group for group in groups for name in group.names}
        names = {id(w): n for g in groups for n, w in zip(g.names, g.weights, strict=True)}
        for layer in layers:
            name = names[id(layer.weight)]
            if not isinstance(layer, StageLinear):
                kind: Any = type(layer)
                layer.__class__ = stage_linear_class(kind)
            layer.adopt(self, name, self._home[name])
        copies = Copies(keeps=dtype is None)
        super().__init__(groups, _inside_compiled(module), copies)
        self._is_compiled_in_place = is_compiled_in_place(module)
        self._anchors: dict[str, Tensor] = {}
        self.without_chain: set[str] = set()
        self.frozen: Collection[str] = ()  # weights and biases that the microbatch at hand freezes
        self.frozen_groups: Collection[str] = ()
        self.microbatch = -1
        self._postponed: dict[int, list[Callable[[], None]]] = {}
        self._postpones = self._acts = False
        self.is_staged = False  # gradients count inside of actions alone
        # X, who reads it, and what they keep of it
        self._read: tuple[Tensor, LinearGroup, Tensor] | None = None

    def learn_frozen(self, dimension: int, first: Callable[[LinearGroup, int], Tensor]) -> None:
        """Have frozen weights learn; a ValueError if a part was compiled in place."""
        if self._is_compiled_in_place:
            raise ValueError(
                f"a part of the stage was compiled in place, by Module.compile(); with "
                f"{key('gradient_rank')} {dimension} it must be what torch.compile(part) returns"
            )
        super().learn_frozen(dimension, first)

    # -- actions -----------------------------------------------------------------------------------

    @contextmanager
    def action_of(
        self, microbatch: int, frozen: Collection[str] = (), *, postpones: bool = False
    ) -> Iterator[None]:
        """Run an action of a microbatch without the exact gradients of ``frozen`` weights.

        A backward may run forwards too, for recomputed layers. The input half of a split backward
        ``postpones`` products of weight gradients to :meth:`run_postponed`.
        """
        self.microbatch, self._postpones, self.frozen = microbatch, postpones, frozen
        self._acts = True
        if self.dimension:
            self.frozen_groups = {self._home[name].name for name in frozen if name in self._home}
        for layer in self._compiled if self.dimension else ():
            layer.basis = self.bases[layer.group.name]
        try:
            yield
        finally:
            self.frozen, self.frozen_groups, self._read = (), (), None
            self._postpones = self._acts = False

    def run_postponed(self, microbatch: int) -> None:
        """Run the products postponed by the input half of a microbatch's backward."""
        with torch.no_grad():
            for add in self._postponed.pop(microbatch, ()):
                add()

    def targets(self) -> list[Tensor]:
        """Return the further targets of a backward, besides live tensors of the graph."""
        found = [one.leaf for one in self._compiled if one.group.name in self.frozen_groups]
        for group in self.groups:
            if group.name in self._anchors and (self.dimension or self._is_live(group)):
                found.append(self._anchors[group.name])
        return found + [self._anchors[g.name] for g in self._adapters if g.name in self._anchors]

    def _is_live(self, group: LinearGroup) -> bool:
        return any(name not in self.frozen for name in (*group.names, *group.bias_names))

    def now_or_later(self, microbatch: int, add: Callable[[], None]) -> None:
        """Add to gradients; in the input half of a split backward only when its other half runs."""
        if self.is_staged and not self._acts:
            return  # torch looks for the types of what stages send, by a backward of noise
        if self._postpones:
            self._postponed.setdefault(microbatch, []).append(add)
        else:
            add()

    def add_to_gradients(self) -> None:
        """Add sums of subspaces and of adapters to gradients, after the last backward."""
        for adapters in self._adapters:
            adapters.add_to_gradients()
        super().add_to_gradients()

    def end_batch(self) -> None:
        """Let go of the sums of a batch."""
        self.forget()
        self._postponed.clear()
        for adapters in self._adapters:
            adapters.forget()
        if self.dtype is None:
            self._copies.forget()

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
        return functional.linear(x.to(self.dtype), self.working(group), self._bias(group))

    def begin(self, group: LinearGroup, x: Tensor) -> tuple[Tensor, Tensor | None, Any]:
        """Return a group's outputs, their gradient's data, and the live; see ``Product``."""
        x = x.to(self.dtype)
        y = functional.linear(x, self.working(group), self._bias(group))
        pairs = zip(group.names, group.layers, strict=True)
        live = [n for n, one in pairs if n not in self.frozen and one.weight.requires_grad]
        biases = [name for name in group.bias_names if name not in self.frozen]
        kept = None
        if live:
            kept = x.reshape(-1, x.shape[-1])
        elif self.dimension:
            kept = self.projected(self._home[group.name], x)
        return y, kept, (self.microbatch, live, biases)

    def end(self, group: LinearGroup, dy: Tensor, kept: Tensor | None, plan: Any) -> None:
        """Take the gradient of a group's outputs, [N, d_out], now or in the weight half."""
        microbatch, live, biases = plan
        if live or biases:
            exact = partial(self._add_exact, group, dy, kept, live, biases)
            self.now_or_later(microbatch, exact)
        if not live and kept is not None:
            home = self._home[group.name]
            columns = slice(0, home.d_out) if home is group else home.columns_of(group.name)
            self.now_or_later(microbatch, partial(self.add, home, columns, dy, kept))

    def _add_exact(
        self, group: LinearGroup, dy: Tensor, kept: Tensor, live: list[str], biases: list[str]
    ) -> None:
        for name, layer, columns in zip(group.names, group.layers, group.columns, strict=True):
            weight, bias = layer.weight, layer.bias
            if name in live:
                weight.grad = added(weight.grad, dy[:, columns].t(), kept, weight.dtype)
            if bias is not None and group.bias_of(name) in biases:
                total = dy[:, columns].sum(dim=0, dtype=bias.dtype)
                bias.grad = total if bias.grad is None else bias.grad.add_(total)

    def working(self, group: LinearGroup) -> Tensor:
        """Return the weights of a group below each other, [d_out, d_in], in ``dtype``."""
        assert self.dtype is not None
        (first, *others) = (layer.weight.detach() for layer in group.layers)
        if not others:
            return self._copies.cast(group.name, first, self.dtype)

        def join() -> Tensor:
            joined = first.new_empty((group.d_out, group.d_in), dtype=self.dtype)
            for columns, weight in zip(group.columns, (first, *others), strict=True):
                joined[columns].copy_(weight)
            return joined

        copy: Tensor = self._copies.get(f"{group.name} and others", join)
        return copy

    def _bias(self, group: LinearGroup) -> Tensor | None:
        """Return the biases of a group side by side, in ``dtype``; None if there is none."""
        if not group.bias_names:
            return None

        def join() -> Tensor:
            parts = [
                layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias
                for layer in group.layers
            ]
            return torch.cat([part.detach() for part in parts]).to(self.dtype)

        copy: Tensor = self._copies.get(f"biases of {group.name}", join)
        return copy

    def adapter_copies(self, group: AdapterGroup) -> tuple[Tensor, Tensor]:
        """Return A and B of a group of adapters in ``dtype``; see :class:`AdapterGroup`."""
        copies: tuple[Tensor, Tensor] = self._copies.get(group.name, group.copies)
        return copies

    # -- torch's products --------------------------------------------------------------------------

    def weight(self, layer: StageLinear, dtype: torch.dtype) -> Tensor:
        """Return W outside of the graph in a type."""
        return self._copies.cast(layer.name, layer.weight.detach(), dtype)

    def attach(self, layer: StageLinear, y: Tensor, x: Tensor) -> Tensor:
        """Return ``y``, with a node in its graph taking the gradient in the subspace."""
        known = self._read
        if known is None or known[0] is not x or known[1] is not layer.group:
            known = self._read = x, layer.group, self.projected(layer.group, x.detach())
        return Take.apply(y, known[2], self, layer, self.microbatch)

    def take(self, layer: StageLinear, dy: Tensor, kept: Tensor, microbatch: int) -> None:
        """Take the gradient of a frozen layer's output; ``kept`` is X Q, or X."""
        columns = layer.group.columns_of(layer.name)
        self.now_or_later(microbatch, partial(self.add, layer.group, columns, dy, kept))

    # -- copies ------------------------------------------------------------------------------------

    @contextmanager
    def copies_kept(self) -> Iterator[None]:
        """Keep copies of weights, constant inside; outside each forward makes its own."""
        with self._copies.kept():
            yield
        for layer in () if self._copies.keeps else self._compiled:
            layer.copy = None

    @contextmanager
    def forwarding(self) -> Iterator[None]:
        """Run the forward of the stage: compiled layers have their copies, from before graphs."""
        for layer in self._compiled if self.dtype is not None else ():
            if layer.copy is None:
                layer.copy = self._copies.cast(layer.name, layer.weight.detach(), self.dtype)
        try:
            yield
        finally:
            for layer in () if self._copies.keeps else self._compiled:
                layer.copy = None


def plain_linears(module: nn.Module) -> list[nn.Linear]:
    """Return the layers of a module that compute x W^T, unlike some of subclasses, as float8."""
    forwards = (nn.Linear.forward, StageLinear.forward)
    layers = [part for part in module.modules() if isinstance(part, nn.Linear)]
    return [layer for layer in layers if type(layer).forward in forwards]


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether ``Module.compile()`` was called on a part."""
    return any(part._compiled_call_impl is not None for part in module.modules())


def linears_of(module: nn.Module) -> StageLinears | None:
    """Return the 16-bit computation of a stage's linear layers, if any."""
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
    """Make copies of weights once for all microbatches of a batch run inside."""
    with ExitStack() as stack:
        for linears in filter(None, map(linears_of, modules)):
            stack.enter_context(linears.copies_kept())
        yield


def _inside_compiled(module: nn.Module) -> list[StageLinear]:
    """Return the adopted layers inside of compiled blocks."""
    blocks = (block for block in module.modules() if isinstance(block, OptimizedModule))
    inside = (layer for block in blocks for layer in block.modules())
    return [layer for layer in inside if isinstance(layer, StageLinear)]
