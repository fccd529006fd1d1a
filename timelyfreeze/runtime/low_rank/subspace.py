"""The subspace following a gradient: a step of subspace iteration for each gradient.

Notation: W of shape [d_out, d_in], the weights of a layer, or of layers of a common input. G is its
gradient, d the shorter of the two sides, Q a basis of k orthonormal directions of this side, shape
[d, k]. All in float32: rounded to bfloat16, a basis is not orthonormal.
"""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from timelyfreeze.policies import mask_rng
from timelyfreeze.runtime.linear.groups import LinearGroup


def first_basis(group: LinearGroup, dimension: int, seed: int) -> Tensor:
    """Return k random directions; the same on all processes with the group's weights.

    Columns are orthonormal, shape [d, k], no more than the shorter side has; groups differ by their
    names.
    """
    d = group.side
    columns = random_columns(d, min(dimension, d), seed, 0, group.name)
    return _orthonormal(columns).to(group.layers[0].weight.device)


def next_basis(
    basis: Tensor,
    gradients: Sequence[Tensor],
    seed: int,
    step: int,
    name: str,
    place: int = 0,
    *,
    of_inputs: bool,
) -> Tensor:
    """Return orth(G^T (G Q)), or orth(G (G^T Q)), with a random direction in the last place.

    G has the ``gradients`` of a group below each other; directions are of its inputs, or of its
    outputs. Power iteration turns the basis towards directions with large gradients, over many
    steps. Turns stay within the span of G, and G may lie in the basis if every microbatch was
    frozen; so the weakest direction is replaced by a random one, new in each step. Ranks that share
    G call this together; ``place`` counts the turns of a step. Q stays where G is 0 or not finite.
    The host waits for no device here.
    """
    sides = [g.float() if of_inputs else g.float().t() for g in gradients]
    # Of products alone, which are small, the largest element is brought to 1: squares of 1e-25
    # would be 0, and a copy of G takes as long as all of this.
    seen = [g @ beside(basis, g) for g in sides]
    scale, is_seen = _scale(seen)
    product = sum(whole(g.t() @ (part / scale)) for g, part in zip(sides, seen, strict=True))
    scale, is_known = _scale([product])
    is_known = is_known & is_seen
    turned = _orthonormal(torch.where(is_known, product / scale, basis))
    tried = random_columns(basis.shape[0], 1, seed, step, name, place)
    tried = tried.to(basis.device, non_blocking=True)
    kept = turned[:, :-1]
    for _ in range(2):  # once more for what rounding left of the others
        tried -= kept @ (kept.t() @ tried)
    turned[:, -1:] = tried / tried.norm()
    return torch.where(is_known, turned, basis).contiguous()


def energies(basis: Tensor, gradients: Sequence[Tensor], *, of_inputs: bool) -> Tensor:
    """Return |G Q|^2 by direction, the energy of the gradient there, and |G|^2; shape [k + 1].

    Subspace iteration turns the first directions as if there were no others, so the first few of
    them are the subspace of a lower dimension.
    """
    sums = []
    for gradient in gradients:
        g = gradient.float()
        q = beside(basis, g)
        inside = whole(g @ q if of_inputs else g.t() @ q).square().sum(dim=0)
        sums.append(torch.cat([inside, whole(g.square().sum())[None]]))
    return torch.stack(sums).sum(dim=0)


def beside(basis: Tensor, gradient: Tensor) -> Tensor:
    """Return Q for a product with the gradient: on all ranks sharing the gradient."""
    if not isinstance(gradient, DTensor):
        return basis
    mesh = gradient.device_mesh
    return DTensor.from_local(basis, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _scale(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the largest element of all, 1 if useless as a scale, and whether it is useful."""
    scale = torch.stack([whole(tensor.abs().max()) for tensor in tensors]).max()
    is_known = scale.isfinite() & (scale > 0.0)
    return scale.where(is_known, 1.0), is_known


def whole(tensor: Tensor) -> Tensor:
    """Return a whole tensor from its shards; a collective call of the sharing ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def random_columns(n: int, k: int, seed: int, step: int, name: str, place: int = 0) -> Tensor:
    """Return normal numbers, float32, shape [n, k]; the same in all processes."""
    # Philox by seed, step and name: no state to keep, and all processes draw alike.
    numbers = mask_rng(seed, step, place, 0, zlib.crc32(name.encode())).standard_normal((n, k))
    return torch.from_numpy(numbers).float()


def _orthonormal(columns: Tensor) -> Tensor:
    return torch.linalg.qr(columns).Q.contiguous()  # as one that was saved: sums round by strides
