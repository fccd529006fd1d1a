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
from torch.distributed.tensor import DTensor

from timelyfreeze.runtime.low_rank.subspace import energies, is_of_inputs, random_columns

_ROWS = 32
# Of the inner products so far, at each step: one pair of batches alone says little.
_FADE = 0.9


class Energies(NamedTuple):
    """Sums over the linear weights of a process.

    Attributes:
        inside: Energy of a gradient in the subspaces.
        whole: All of it.
        agreed_inside: Inner products of gradients of batches in a row, in the subspaces.
        agreed: The same of whole gradients; 0 where nothing is known yet.
    """

    inside: float = 0.0
    whole: float = 0.0
    agreed_inside: float = 0.0
    agreed: float = 0.0


class CapturedMeter:
    """Measures the energies of one exact gradient after the other.

    Args:
        seed: Of the sketches.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._former: dict[str, tuple[Tensor, Tensor]] = {}  # S G, and Q from before G
        self._agreed, self._n_gradients = torch.zeros(2), 0

    @property
    def knows_enough(self) -> bool:
        """Whether two gradients in a row were compared, with directions that are not random."""
        return self._n_gradients > 2

    def measure(self, weights: Iterable[tuple[str, Tensor, Tensor]]) -> Energies:
        """Return what the gradients that are there have. Waits for devices.

        Args:
            weights: Name, weight, and Q as it was before it followed these gradients.
        """
        sums, agreed = torch.zeros(2), torch.zeros(2)
        for name, weight, basis in weights:
            if weight.grad is None:
                continue
            sums += energies(basis, weight.grad).cpu()
            sketch = self._sketch(name, weight.grad)
            if sketch is not None and name in self._former:
                former, q = self._former[name]
                inside = ((sketch @ q) * (former @ q)).sum()
                agreed += torch.stack([inside, (sketch * former).sum()]).cpu()
            # The first directions are random, and say nothing of those that follow.
            if sketch is not None and self._n_gradients > 0:
                self._former[name] = sketch, basis
        self._agreed = _FADE * self._agreed + agreed
        self._n_gradients += 1
        return Energies(*sums.tolist(), *self._agreed.tolist())

    def _sketch(self, name: str, gradient: Tensor) -> Tensor | None:
        """Return S G, shape [rows of S, d]; None where ranks share each line of G along Q."""
        own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if not is_of_inputs(gradient):
            if own is not gradient:
                return None
            own = own.t()
        signs = random_columns(own.shape[0], _ROWS, self._seed, 0, name, place=1)
        return signs.to(own.device).t() @ own.float()

    def forget(self) -> None:
        """Let go of the last gradients."""
        self._former.clear()

    def tensors(self, bases: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what a checkpoint keeps; what is not known is 0, and agrees with nothing."""
        kept = {"agreed": torch.tensor([*self._agreed.tolist(), float(self._n_gradients)])}
        for name, basis in bases.items():
            nothing = basis.new_zeros(_ROWS, basis.shape[0]), torch.zeros_like(basis)
            sketch, directions = self._former.get(name, nothing)
            kept |= {f"sketch.{name}": sketch.clone(), f"former.{name}": directions.clone()}
        return kept

    def load(self, saved: Mapping[str, Tensor], names: Iterable[str]) -> None:
        """Go on with what :meth:`tensors` returned."""
        *agreed, n_gradients = saved["agreed"].tolist()
        self._agreed, self._n_gradients = torch.tensor(agreed), int(n_gradients)
        self._former = {n: (saved[f"sketch.{n}"], saved[f"former.{n}"]) for n in names}
