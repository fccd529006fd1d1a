"""What subspaces hold of the gradients: of their energy, and of what batches agree on.

A batch's gradient is the mean one, which teaches, and noise, most of its energy. A subspace holds
more of the mean one, since directions follow what stays. The noises of two batches know nothing of
each other, so the inner product of their gradients is that of the mean one with itself, and the
inner product in a subspace that is older than both is its part in there.

Of a gradient G, a sketch S G waits for the next batch, S random with few rows: inner products of
sketches are those of the gradients, on average.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from timelyfreeze.runtime.low_rank.subspace import (
    beside,
    energies,
    is_of_inputs,
    random_columns,
    whole,
)

_ROWS = 32
# Of the inner products so far, at each step: one pair of batches alone says little.
_FADE = 0.9


class Energies(NamedTuple):
    """Sums over the linear weights of a process."""

    inside: float = 0.0  # energy of a gradient in the subspaces
    whole: float = 0.0  # all of it
    agreed_inside: float = 0.0  # inner products of gradients of batches in a row, in the subspaces
    agreed: float = 0.0  # the same of whole gradients; 0 where nothing is known yet


class CapturedMeter:
    """Measures the energies of one exact gradient after the other."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._former: dict[str, tuple[Tensor, Tensor]] = {}  # S G, and Q from before G
        # Of each weight: inner products inside and in all, faded, and how many gradients it had.
        self._agreed: dict[str, Tensor] = {}

    @property
    def knows_enough(self) -> bool:
        """Whether two gradients in a row were compared, with directions that are not random."""
        return any(seen[2] > 2 for seen in self._agreed.values())

    def measure(self, weights: Iterable[tuple[str, Tensor, Tensor]]) -> Energies:
        """Return what the gradients that are there have. Waits for devices.

        ``weights`` has names, weights, and Q as it was before it followed these gradients.
        """
        sums, agreed = torch.zeros(2), torch.zeros(2)
        for name, weight, basis in weights:
            if weight.grad is None:
                continue
            sums += energies(basis, weight.grad).cpu()
            seen = self._agreed.setdefault(name, torch.zeros(3))
            seen[:2] *= _FADE
            sketch = self._sketch(name, weight.grad)
            if name in self._former:
                former, q = self._former[name]
                inside = ((sketch @ q) * (former @ q)).sum()
                seen[:2] += torch.stack([inside, (sketch * former).sum()]).cpu()
            # The first directions are random, and say nothing of those that follow.
            if seen[2] > 0:
                self._former[name] = sketch, basis
            seen[2] += 1
            agreed += seen[:2]
        return Energies(*sums.tolist(), *agreed.tolist())

    def _sketch(self, name: str, gradient: Tensor) -> Tensor:
        """Return S G, shape [rows of S, d]; ranks that share G call this together."""
        g = gradient.float() if is_of_inputs(gradient) else gradient.float().t()
        columns = random_columns(g.shape[0], _ROWS, self._seed, 0, name, place=1)
        return whole(beside(columns.to(g.device), g).t() @ g)

    def forget(self) -> None:
        """Let go of the last gradients."""
        self._former.clear()

    def tensors(self, bases: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what a checkpoint keeps; what is not known is 0, and agrees with nothing."""
        kept: dict[str, Tensor] = {}
        for name, basis in bases.items():
            nothing = basis.new_zeros(_ROWS, basis.shape[0]), torch.zeros_like(basis)
            sketch, directions = self._former.get(name, nothing)
            seen = self._agreed.get(name, torch.zeros(3))
            found = {"sketch": sketch, "former": directions, "agreed": seen}
            kept |= {f"{kind}.{name}": tensor.clone() for kind, tensor in found.items()}
        return kept

    def load(self, saved: Mapping[str, Tensor], names: Iterable[str]) -> None:
        """Go on with what :meth:`tensors` returned."""
        for name in names:
            self._former[name] = saved[f"sketch.{name}"], saved[f"former.{name}"]
            self._agreed[name] = saved[f"agreed.{name}"]
