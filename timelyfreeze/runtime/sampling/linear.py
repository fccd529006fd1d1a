"""Linear layers whose backward products can be computed from a sample of their tokens.

Notation: N tokens (all of a microbatch), y = x W^T, dy the gradient that arrives at y. Two products
make the backward, dX = dy W and dW = dy^T x; either can be taken of a part of the tokens, so that
its mean over draws stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.nn import functional

from timelyfreeze.runtime.sampling.draw import (
    draw_tokens,
    inclusion_probabilities,
    levelled,
    n_kept,
)
from timelyfreeze.runtime.sampling.variance import VarianceMeter
from timelyfreeze.settings import TENSORS, key


@dataclass(frozen=True, eq=False)
class TokenSample:
    """How one microbatch's backward is sampled in a stage of L linear layers.

    Attributes:
        ratio: Fraction of tokens that weight gradients leave out, in [0, 1).
        input_ratio: Fraction of tokens that input gradients leave out, in [0, 1).
        numbers: Uniform random numbers, shape [L, 2]: for the weight and the input gradient.
    """

    ratio: float
    input_ratio: float
    numbers: NDArray[np.float64]


class TokenSampler:
    """What the linear layers of a stage share: the sample of the microbatch at hand.

    One thread runs one action of a stage at a time, so layers read here what the stage has set, in
    the forward, in the backward and where activations are computed again.

    Attributes:
        n_layers: L, layers that are sampled.
    """

    def __init__(self, module: nn.Module) -> None:
        self.n_layers = 0
        self._sample: TokenSample | None = None
        self._wants_inputs = self._wants_weights = True
        self._meter: VarianceMeter | None = None
        self._casts: dict[int, Tensor] = {}
        self._last: tuple[Tensor, Tensor] | None = None
        for layer in module.modules():
            if _multiplies_plainly(layer):
                _adopt(layer, self, self.n_layers)
                self.n_layers += 1

    @contextmanager
    def sampling(
        self,
        sample: TokenSample | None,
        *,
        inputs: bool = True,
        weights: bool = True,
        meter: VarianceMeter | None = None,
    ) -> Iterator[None]:
        """Run one action.

        Args:
            sample: The microbatch's; None to compute everything exactly.
            inputs: Whether a backward is after the gradients of inputs.
            weights: Whether a backward is after the gradients of weights. The halves of a split
                backward run the same graph twice, so a layer has to be told which one it is.
            meter: Measures exact backwards.
        """
        self._meter = meter
        self._sample, self._wants_inputs, self._wants_weights = sample, inputs, weights
        try:
            yield
        finally:
            self._sample, self._wants_inputs, self._wants_weights = None, True, True
            self._meter = self._last = None

    def cast(self, layer: int, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a layer's weight in autocast's type: cast once for all microbatches of a batch.

        Autocast does the same for the layers that it casts itself. A graph runs through the cast,
        which keeps nothing, so that every microbatch's backward may pass it.
        """
        known = self._casts.get(layer)
        if known is None or known.dtype != dtype:
            known = self._casts[layer] = weight.to(dtype)
        return known

    def end_batch(self) -> None:
        """Let go of what was kept for the batch, whose weights are about to change."""
        self._casts.clear()

    @property
    def is_on(self) -> bool:
        """Whether the action at hand belongs to a microbatch that is sampled or measured."""
        return self._sample is not None or self._meter is not None

    def gradients(
        self, layer: int, x: Tensor, weight: Tensor, dy: Tensor, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return dX and dW of a layer, None if not wanted; ``x`` and ``dy`` have N rows."""
        sample = self._sample
        sizes = None
        dx = dw = None
        if sample is not None:
            sizes = _row_norms(dy)
        if self._wants_inputs and needs[0]:
            dx = _input_gradient(weight, dy, sizes, sample, layer)
        if self._wants_weights and needs[1]:
            terms = None if sizes is None else sizes * self._norms_of(x)
            dw = _weight_gradient(x, dy, terms, sample, layer)
            if self._meter is not None:
                self._meter.add(layer, _row_norms(dy) * self._norms_of(x), dw)
        return dx, dw

    def _norms_of(self, x: Tensor) -> Tensor:
        """Return the norms of a layer's input, which neighbouring layers often share.

        The tensor is kept with them until the action ends, so that no other can take its place in
        memory meanwhile.
        """
        if self._last is not None:
            known, norms = self._last
            if known.data_ptr() == x.data_ptr() and known.shape == x.shape:
                return norms
        norms = _row_norms(x)
        self._last = (x, norms)
        return norms


class SampledLinear(nn.Linear):  # type: ignore[misc]
    """A linear layer that a :class:`TokenSampler` has adopted."""

    sampler: TokenSampler
    number: int

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b, as the base class does."""
        if not self.sampler.is_on or not torch.is_grad_enabled():
            return super().forward(x)
        weight, bias = self.weight, self.bias
        if isinstance(weight, DTensor):
            raise ValueError(
                f"a linear layer's weight is split between processes ({weight.placements}), as by "
                f"tensor parallelism; its tokens cannot be sampled, so set {key('unit')} to "
                f'"{TENSORS}"'
            )
        device = x.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, weight = x.to(dtype), self.sampler.cast(self.number, weight, dtype)
        y = _SampledProduct.apply(x, weight, self.sampler, self.number)
        return y if bias is None else y + bias.to(y.dtype)  # as autocast casts it


class _SampledProduct(Function):  # type: ignore[misc]
    """y = x W^T with the backward of a :class:`TokenSampler`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sampler: TokenSampler, number: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sampler, ctx.number = sampler, number
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        dx, dw = ctx.sampler.gradients(
            ctx.number,
            x.reshape(-1, x.shape[-1]),
            weight,
            dy.reshape(-1, dy.shape[-1]),
            ctx.needs_input_grad[:2],
        )
        return None if dx is None else dx.view(x.shape), dw, None, None


def _multiplies_plainly(layer: nn.Module) -> bool:
    """Return whether a layer computes x W^T; a subclass, as for float8, may do something else."""
    if not isinstance(layer, nn.Linear):
        return False
    return isinstance(layer, SampledLinear) or type(layer).forward is nn.Linear.forward


def _adopt(layer: nn.Linear, sampler: TokenSampler, number: int) -> None:
    if not isinstance(layer, SampledLinear):
        layer.__class__ = _sampled_class(type(layer))  # type: ignore[arg-type]
    layer.sampler, layer.number = sampler, number


@cache
def _sampled_class(kind: Any) -> type[SampledLinear]:
    """Return the class of an adopted layer, which may be one that FSDP has made."""
    if kind is nn.Linear:
        return SampledLinear
    made: type[SampledLinear] = type(f"Sampled{kind.__name__}", (SampledLinear, kind), {})
    return made


def _row_norms(rows: Tensor) -> Tensor:
    # Rounded to bfloat16, a size serves as well, and is found in a twentieth of the time on a CPU;
    # float16 could overflow.
    dtype = torch.float32 if rows.dtype == torch.float16 else None
    return torch.linalg.vector_norm(rows, dim=1, dtype=dtype).float()


def _input_gradient(
    weight: Tensor, dy: Tensor, sizes: Tensor | None, sample: TokenSample | None, layer: int
) -> Tensor:
    n_drawn = len(dy) if sample is None else n_kept(len(dy), sample.input_ratio)
    if sample is None or sizes is None or n_drawn == len(dy):
        return dy.mm(weight)
    probabilities = inclusion_probabilities(levelled(sizes), n_drawn)
    kept, factors = draw_tokens(probabilities, n_drawn, float(sample.numbers[layer, 1]))
    rows = _scaled(dy.index_select(0, kept), factors).mm(weight)
    # Empty places of the draw repeat a position; they go to a row behind the last one.
    targets = torch.where(factors > 0.0, kept, len(dy))
    return rows.new_zeros(len(dy) + 1, weight.shape[1]).index_copy_(0, targets, rows)[:-1]


def _weight_gradient(
    x: Tensor, dy: Tensor, terms: Tensor | None, sample: TokenSample | None, layer: int
) -> Tensor:
    n_drawn = len(dy) if sample is None else n_kept(len(dy), sample.ratio)
    if sample is None or terms is None or n_drawn == len(dy):
        return dy.t().mm(x)
    probabilities = inclusion_probabilities(terms, n_drawn)
    kept, factors = draw_tokens(probabilities, n_drawn, float(sample.numbers[layer, 0]))
    # Much faster than indexing with brackets.
    rows, columns = dy.index_select(0, kept), x.index_select(0, kept)
    if rows.shape[1] <= columns.shape[1]:
        rows = _scaled(rows, factors)
    else:
        columns = _scaled(columns, factors)
    return rows.t().mm(columns)


def _scaled(rows: Tensor, factors: Tensor) -> Tensor:
    """Return rows times factors, in the type of the rows.

    A factor is rounded to that type like any other value: what float32 in between would cost, a
    third of a small layer's product on a CPU, is more than 0.4% of one token's part is worth. In
    float16 a factor could overflow.
    """
    if rows.dtype == torch.float16:
        return (rows * factors.unsqueeze(1)).to(rows.dtype)
    return rows * factors.to(rows.dtype).unsqueeze(1)
