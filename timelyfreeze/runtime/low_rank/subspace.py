"""The subspace that follows a weight's gradient: one step of subspace iteration for each gradient.

Notation: W of shape [d_out, d_in], G its gradient, d the shorter of the two sides, Q a basis of k
orthonormal directions of that side, shape [d, k]. All of it is float32: an orthonormal basis that
is rounded to bfloat16 is none.

A batch's gradient is the mean one, which teaches, and noise, most of its energy. A subspace holds
more of the mean one, since directions follow what stays. The noises of two batches know nothing of
each other, so the inner product of their gradients is that of the mean one with itself, and the
inner product in a subspace that is older than both is its part in there. Of G a sketch S G waits
for the next batch, S random with few rows: inner products of sketches are those of the gradients,
on average.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from timelyfreeze.masks import mask_rng


def is_of_inputs(weight: Tensor) -> bool:
    """Return whether directions are those of a layer's input, its shorter side or as short."""
    return bool(weight.shape[1] <= weight.shape[0])


def first_basis(weight: Tensor, rank: int, seed: int, name: str) -> Tensor:
    """Return k random directions; the same on every process that holds the weight.

    Columns are orthonormal, shape [d, k], no more than the shorter side has; by their names layers
    begin apart.
    """
    d = min(weight.shape)
    return _orthonormal(random_columns(d, min(rank, d), seed, 0, name)).to(weight.device)


def next_basis(
    basis: Tensor, gradient: Tensor, seed: int, step: int, name: str, place: int = 0
) -> Tensor:
    """Return orth(G^T (G Q)), or orth(G (G^T Q)), with a random direction in the last place.

    Power iteration turns the basis towards the directions in which gradients are large, over many
    steps. It only ever turns within what G shows, and G may lie in the basis where every microbatch
    was frozen; so the weakest direction is given up for a random one, new in each step. Ranks that
    share G call this together; ``place`` counts the turns of a step. Q stays where G is 0 or not
    finite.
    """
    g = gradient.float()
    if not is_of_inputs(gradient):
        g = g.t()
    # Of products alone, which are small, the largest element is brought to 1: squares of 1e-25
    # would be 0, and a copy of G takes as long as all of this.
    seen = _scaled(g @ beside(basis, g))
    product = None if seen is None else _scaled(whole(g.t() @ seen))
    if product is None:
        return basis
    turned = _orthonormal(product)
    tried = random_columns(basis.shape[0], 1, seed, step, name, place).to(basis.device)
    kept = turned[:, :-1]
    for _ in range(2):  # once more for what rounding left of the others
        tried -= kept @ (kept.t() @ tried)
    turned[:, -1:] = tried / tried.norm()
    return turned


def energies(basis: Tensor, gradient: Tensor) -> Tensor:
    """Return |G Q|^2, the energy of the gradient that lies in Q, and |G|^2; float32, shape [2]."""
    g = gradient.float()
    q = beside(basis, g)
    inside = g @ q if is_of_inputs(gradient) else g.t() @ q
    return torch.stack([whole(inside).square().sum(), whole(g.square().sum())])


def beside(basis: Tensor, gradient: Tensor) -> Tensor:
    """Return Q as a product with the gradient needs it: on each of the ranks that share that."""
    if not isinstance(gradient, DTensor):
        return basis
    mesh = gradient.device_mesh
    return DTensor.from_local(basis, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _scaled(tensor: Tensor) -> Tensor | None:
    """Return a tensor over its largest element; None if that is 0 or not finite."""
    scale = whole(tensor.abs().max())
    return tensor / scale if torch.isfinite(scale) and scale > 0.0 else None


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor that ranks may share, put together; they call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def random_columns(n: int, k: int, seed: int, step: int, name: str, place: int = 0) -> Tensor:
    """Return normal numbers, float32, shape [n, k]; the same in each process."""
    # Philox by seed, step and name: no state to keep, and all processes draw alike.
    numbers = mask_rng(seed, step, place, 0, zlib.crc32(name.encode())).standard_normal((n, k))
    return torch.from_numpy(numbers).float()


def _orthonormal(columns: Tensor) -> Tensor:
    return torch.linalg.qr(columns).Q


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
