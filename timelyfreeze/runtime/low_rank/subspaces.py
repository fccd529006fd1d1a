"""The subspaces of a process's linear weights from step to step, and what is saved of them.

A batch's gradient is the mean one, which teaches, and noise, most of its energy. A subspace holds
more of the mean one, since directions follow what stays. The noises of two batches know nothing of
each other, so the inner product of their gradients is that of the mean one with itself, and the
inner product in a subspace that is older than both is its part in there. Of G a sketch S G waits
for the next batch, S random with few rows: inner products of sketches are those of the gradients,
on average. Notation is that of ``subspace``.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from timelyfreeze.runtime.linear import LinearGroup, StageLinears
from timelyfreeze.runtime.low_rank.subspace import (
    beside,
    energies,
    next_basis,
    whole,
)
from timelyfreeze.settings import Step
from timelyfreeze.timing import Energies

# The last steps of the warm-up turn each weight several times. Earlier turns would be wasted, as
# gradients move on, and steps without any are what frozen ones are compared with.
_PREPARING, _ITERATIONS = 12, 3
# Steps in which each weight turns once after the warm-up, not all of them in the same: a turn takes
# longer than a microbatch's products in a subspace, and directions change slowly.
_EVERY = 4
_ROWS = 32  # of a sketch
# Of the inner products so far, at each step: one pair of batches alone says little.
_FADE = 0.9


class Subspaces:
    """Subspaces that turn after gradients: often as the warm-up ends, later once in four steps.

    They begin with the highest of ``dimensions``, ascending, of which :meth:`keep` takes one.
    """

    def __init__(
        self, layers: Sequence[StageLinears], seed: int, dimensions: Sequence[int]
    ) -> None:
        self.layers, self._seed, self.step = tuple(layers), seed, Step()
        self.dimensions, self.dimension = tuple(dimensions), dimensions[-1]
        # of each dimension, by the last exact gradients
        self.measured = dict.fromkeys(self.dimensions, Energies())
        self._is_measured = False
        self._former: dict[str, tuple[Tensor, Tensor]] = {}  # S G, and Q from before G
        # Of each weight: inner products inside, for each dimension, and in all, faded.
        self._agreed: dict[str, Tensor] = {}
        self._n_seen: dict[str, int] = {}  # how many gradients each had

    def begin_step(self, step: Step) -> None:
        """Enter an optimizer step."""
        self.step = step
        if not self._is_measured:
            self._former.clear()
        self._is_measured = False

    @property
    def prepares(self) -> bool:
        """Whether this step is one of the last of the warm-up."""
        return -_PREPARING < self.step.after_warmup <= 0

    @property
    def knows_energies(self) -> bool:
        """Whether two gradients in a row were compared, with directions that are not random."""
        return any(n > 2 for n in self._n_seen.values())

    @property
    def shares(self) -> tuple[float, float]:
        """What a direction multiplies for each token in all layers, and what exact products do."""
        shapes = [(group.d_in, group.d_out) for group in self._groups]
        return float(sum(map(sum, shapes))), float(sum(map(math.prod, shapes)))

    @property
    def _groups(self) -> list[LinearGroup]:
        return [group for layers in self.layers for group in layers.groups]

    def keep(self, dimension: int) -> None:
        """Keep as many directions, the first ones, of each subspace."""
        self.dimension = dimension
        for layers in self.layers:
            layers.truncate(dimension)
        self._former = {name: (s, q[:, :dimension]) for name, (s, q) in self._former.items()}
        place = self.dimensions.index(dimension)
        for agreed in self._agreed.values():
            agreed[place:-1] = agreed[place].clone()

    def energies(self) -> Energies:
        """Return what exact gradients have inside of the subspaces, and in all. Waits for devices.

        To be called before :meth:`end_batch`: directions are not to be judged by the gradient that
        they were turned by.
        """
        self._is_measured = True
        found: list[Tensor] = []
        for layers in self.layers:
            with layers.timed_update():
                for group in layers.groups:
                    gradients = _gradients(group)
                    if gradients:
                        basis = layers.bases[group.name]
                        agreed = self._agree(group, basis, gradients)
                        energy = energies(basis, gradients, of_inputs=group.of_inputs)
                        inside = self._of_dimensions(energy[:-1])
                        found.append(torch.cat([inside, energy[-1:], agreed]))
        if not found:
            return Energies()
        # In double, since squares may be small; one wait for all.
        energy, agreed = torch.stack(found).double().cpu().chunk(2, dim=1)
        squares = agreed.t() @ agreed
        for i, dimension in enumerate(self.dimensions):
            sums = [energy[:, i], energy[:, -1], agreed[:, i], agreed[:, -1]]
            of_squares = squares[i, i], squares[-1, -1], squares[i, -1]
            self.measured[dimension] = Energies(*(float(t.sum()) for t in (*sums, *of_squares)))
        return self.measured[self.dimension]

    def _of_dimensions(self, directions: Tensor) -> Tensor:
        """Return sums over the first directions, for each dimension, shape [dimensions]."""
        sums = directions.cumsum(dim=0)
        # Not by a list of places, which would be copied to the device while the host waits.
        return torch.stack([sums[min(dimension, len(sums)) - 1] for dimension in self.dimensions])

    def _agree(self, group: LinearGroup, basis: Tensor, gradients: Sequence[Tensor]) -> Tensor:
        """Return the inner products of a group's gradients so far, inside and in all, faded."""
        name = group.name
        sketch, n_seen = self._sketch(group, gradients), self._n_seen.get(name, 0)
        agreed = _FADE * self._agreed.get(name, sketch.new_zeros(len(self.dimensions) + 1))
        if name in self._former:
            former, q = self._former[name]
            inside = self._of_dimensions(((sketch @ q) * (former @ q)).sum(dim=0))
            agreed += torch.cat([inside, (sketch * former).sum()[None]])
        # The first directions are random, and say nothing of those that follow.
        if n_seen > 0:
            self._former[name] = sketch, basis
        self._agreed[name], self._n_seen[name] = agreed, n_seen + 1
        return agreed

    def _sketch(self, group: LinearGroup, gradients: Sequence[Tensor]) -> Tensor:
        """Return S G, shape [rows of S, d]; ranks that share G call this together."""
        parts = []
        for name, gradient in zip(group.names, gradients, strict=True):
            g = gradient.float() if group.of_inputs else gradient.float().t()
            # Drawn where G is: S is as large as a few columns of each weight, the same each time.
            numbers = torch.Generator(g.device)
            numbers.manual_seed((self._seed * 2**32 + zlib.crc32(name.encode())) % 2**63)
            columns = torch.randn(g.shape[0], _ROWS, generator=numbers, device=g.device)
            parts.append(whole(beside(columns, g).t() @ g))
        return torch.stack(parts).sum(dim=0)

    def end_batch(self, index: int) -> None:
        """Leave the batch of that index of the step; its gradients are there, and reduced."""
        for layers in self.layers if index == 0 else ():
            with layers.timed_update():
                for group in layers.groups:
                    name, gradients = group.name, _gradients(group)
                    when = self._seed, self.step.number, name
                    for place in range(self._n_turns(name) if gradients else 0):
                        layers.bases[name] = next_basis(
                            layers.bases[name], gradients, *when, place, of_inputs=group.of_inputs
                        )

    def _n_turns(self, name: str) -> int:
        if self.step.after_warmup <= 0:
            return _ITERATIONS if self.prepares else 0
        return 1 if (self.step.number + zlib.crc32(name.encode())) % _EVERY == 0 else 0

    def tensors(self) -> dict[str, Tensor]:
        """Return copies for a checkpoint, by ``"<kind>.<weight>"``; what is not known is 0.

        They have places for the highest dimension, so that shapes follow from the settings alone.
        """
        kept: dict[str, Tensor] = {}
        for name, basis in [pair for layers in self.layers for pair in layers.bases.items()]:
            nothing = basis.new_zeros(_ROWS, basis.shape[0]), torch.zeros_like(basis)
            sketch, former = self._former.get(name, nothing)
            agreed = self._agreed.get(name, basis.new_zeros(len(self.dimensions) + 1))
            seen = torch.cat([agreed, agreed.new_tensor([self._n_seen.get(name, 0)])])
            gap = (0, min(self.dimensions[-1], basis.shape[0]) - basis.shape[1])
            basis, former = pad(basis, gap), pad(former, gap)
            found = {"basis": basis, "sketch": sketch, "former": former, "agreed": seen}
            kept |= {f"{kind}.{name}": tensor.clone() for kind, tensor in found.items()}
        return kept

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on with what :meth:`tensors` returned."""
        for layers in self.layers:
            layers.load({name: saved.get(f"basis.{name}") for name in layers.bases})
            for name in layers.bases:
                former = saved[f"former.{name}"][:, : self.dimension]
                self._former[name] = saved[f"sketch.{name}"], former
                *agreed, n_seen = saved[f"agreed.{name}"].tolist()
                self._agreed[name] = layers.bases[name].new_tensor(agreed)
                self._n_seen[name] = int(n_seen)
        self._is_measured = True  # the gradients before may have been


def _gradients(group: LinearGroup) -> list[Tensor]:
    """Return the gradients of a group's weights; none where one has none."""
    gradients = [weight.grad for weight in group.weights if weight.grad is not None]
    return gradients if len(gradients) == len(group.weights) else []
