"""The subspaces of a process's linear weights from step to step, and what is saved of them."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from timelyfreeze.runtime.low_rank.layers import LowRankLayers
from timelyfreeze.runtime.low_rank.subspace import CapturedMeter, Energies, next_basis

_ITERATIONS = 3
# Steps in which each weight turns once after the warm-up, not all of them in the same: a turn takes
# longer than a microbatch's products in a subspace, and directions change slowly.
_EVERY = 4


class Subspaces:
    """Subspaces that turn after each step's gradients.

    In the warm-up, which they begin at random, they turn several times a step; later once in four
    steps.
    """

    def __init__(self, layers: Sequence[LowRankLayers], seed: int) -> None:
        self._layers, self._seed, self._step, self._is_warm = tuple(layers), seed, 0, True
        self._captured, self._is_measured = CapturedMeter(seed), False

    def begin_step(self, step: int, *, is_warm: bool) -> None:
        """Enter an optimizer step. ``is_warm``: it comes after the warm-up."""
        self._step, self._is_warm = step, is_warm
        if not self._is_measured:
            self._captured.forget()
        self._is_measured = False

    @property
    def knows_energies(self) -> bool:
        """Whether :meth:`energies` has seen enough gradients to know what they agree on."""
        return self._captured.knows_enough

    def energies(self) -> Energies:
        """Return what exact gradients have inside of the subspaces, and in all. Waits for devices.

        To be called before :meth:`end_batch`: directions are not to be judged by the gradient that
        they were turned by.
        """
        self._is_measured = True
        return self._captured.measure(
            (name, weight, layers.bases[name])
            for layers in self._layers
            for name, weight in layers.weights.items()
        )

    def end_batch(self, index: int) -> None:
        """Leave the batch of that index of the step; its gradients are there, and reduced."""
        for layers in self._layers if index == 0 else ():
            with layers.turned_in():
                for name, weight in layers.weights.items():
                    for place in range(0 if weight.grad is None else self._n_turns(name)):
                        layers.bases[name] = next_basis(
                            layers.bases[name], weight.grad, self._seed, self._step, name, place
                        )

    def _n_turns(self, name: str) -> int:
        if not self._is_warm:
            return _ITERATIONS
        return 1 if (self._step + zlib.crc32(name.encode())) % _EVERY == 0 else 0

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps, by ``"<kind>.<weight>"``; loading writes into copies."""
        bases = {name: q for layers in self._layers for name, q in layers.bases.items()}
        kept = {f"basis.{name}": basis.clone() for name, basis in bases.items()}
        return kept | self._captured.tensors(bases)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on with what :meth:`tensors` returned."""
        for layers in self._layers:
            layers.load({name: saved.get(f"basis.{name}") for name in layers.weights})
        self._captured.load(saved, [name for layers in self._layers for name in layers.weights])
        self._is_measured = True  # the gradients before may have been
