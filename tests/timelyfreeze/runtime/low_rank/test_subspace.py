"""Subspaces that follow gradients: their directions by an eigendecomposition."""

import pytest
import torch
from torch import Tensor, nn

from timelyfreeze.runtime.linear import LinearGroup
from timelyfreeze.runtime.low_rank import subspace

D_OUT, D_IN, RANK, SEED = 30, 12, 4, 42


def first_basis(weight: Tensor, rank: int, seed: int, name: str) -> Tensor:
    return subspace.first_basis(LinearGroup([nn.Linear(*weight.shape[::-1])], [name]), rank, seed)


def next_basis(
    basis: Tensor, gradient: Tensor, seed: int, step: int, name: str, place: int = 0
) -> Tensor:
    of_inputs = gradient.shape[1] <= gradient.shape[0]
    return subspace.next_basis(basis, [gradient], seed, step, name, place, of_inputs=of_inputs)


def energies(basis: Tensor, gradient: Tensor) -> Tensor:
    return subspace.energies(basis, [gradient], of_inputs=gradient.shape[1] <= gradient.shape[0])


def gradient_of_rank(rank: int, *, noise: float = 0.0, transposed: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(n, rank, generator=generator) for n in (D_OUT, D_IN))
    found = left @ right.t() + noise * torch.randn(D_OUT, D_IN, generator=generator)
    return found.t().contiguous() if transposed else found


def basis_after(gradient: Tensor, n_steps: int) -> Tensor:
    basis = first_basis(gradient, RANK, SEED, "w")
    for step in range(1, n_steps + 1):
        basis = next_basis(basis, gradient, SEED, step, "w")
    return basis


def captured(basis: Tensor, gradient: Tensor) -> float:
    *inside, whole = energies(basis, gradient).tolist()
    return sum(inside) / whole


@pytest.mark.parametrize("transposed", [False, True])
def test_directions_are_orthonormal_and_of_the_shorter_side(transposed: bool) -> None:
    basis = basis_after(gradient_of_rank(6, transposed=transposed), 3)
    assert basis.shape == (D_IN, RANK)
    torch.testing.assert_close(basis.t() @ basis, torch.eye(RANK))


def test_there_are_no_more_directions_than_the_shorter_side_has() -> None:
    assert first_basis(torch.zeros(3, 5), 99, SEED, "w").shape == (3, 3)


def test_the_first_ones_turn_as_a_smaller_subspace_does() -> None:
    gradient = gradient_of_rank(6)
    basis = first_basis(gradient, RANK, SEED, "w")
    few = basis[:, : RANK - 1]
    for step in (1, 2, 3):
        basis = next_basis(basis, gradient, SEED, step, "w")
        few = torch.linalg.qr(gradient.t() @ (gradient @ few)).Q  # without a direction by chance
    kept = basis[:, : RANK - 1]
    torch.testing.assert_close(kept @ kept.t(), few @ few.t())


@pytest.mark.parametrize("transposed", [False, True])
def test_they_turn_to_the_largest_of_the_gradient(transposed: bool) -> None:
    """All but the last one, which is given to chance; the gradient's rank is k - 1."""
    gradient = gradient_of_rank(RANK - 1, transposed=transposed)
    assert captured(first_basis(gradient, RANK, SEED, "w"), gradient) < 0.9
    assert captured(basis_after(gradient, 3), gradient) > 1 - 1e-5
    noisy = gradient_of_rank(RANK - 1, noise=0.3, transposed=transposed)
    values = torch.linalg.svdvals(noisy).square()
    best = float(values[: RANK - 1].sum() / values.sum())
    assert captured(basis_after(noisy, 30), noisy) > best - 0.01


def test_a_basis_that_sees_only_itself_still_moves() -> None:
    """Where all microbatches are frozen the gradient lies in Q; the random direction looks on."""
    true = gradient_of_rank(RANK - 1)
    basis = first_basis(true, RANK, SEED, "w")
    before = captured(basis, true)
    for step in range(1, 200):
        basis = next_basis(basis, true @ basis @ basis.t(), SEED, step, "w")
    assert captured(basis, true) > before + 0.3


def test_every_process_draws_alike_and_layers_apart() -> None:
    weight = torch.zeros(D_OUT, D_IN)
    assert torch.equal(first_basis(weight, 3, SEED, "a"), first_basis(weight, 3, SEED, "a"))
    assert not torch.equal(first_basis(weight, 3, SEED, "a"), first_basis(weight, 3, SEED, "b"))
    assert not torch.equal(first_basis(weight, 3, SEED, "a"), first_basis(weight, 3, 7, "a"))


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_gradient_that_says_nothing_turns_nothing(value: float) -> None:
    basis = first_basis(torch.zeros(D_OUT, D_IN), RANK, SEED, "w")
    assert torch.equal(next_basis(basis, torch.full((D_OUT, D_IN), value), SEED, 1, "w"), basis)


def test_the_size_of_a_gradient_does_not_matter() -> None:
    gradient = gradient_of_rank(6)
    basis = first_basis(gradient, RANK, SEED, "w")
    one, other = (next_basis(basis, s * gradient, SEED, 1, "w") for s in (1.0, 1e-25))
    torch.testing.assert_close(one.abs(), other.abs(), atol=1e-4, rtol=0)


def test_gradients_of_one_input_turn_as_the_one_that_has_them_below_each_other() -> None:
    whole = gradient_of_rank(6, noise=0.1)
    parts = list(whole.split([5, 18, 7]))
    basis = first_basis(whole, RANK, SEED, "w")
    turned = subspace.next_basis(basis, parts, SEED, 1, "w", of_inputs=True)
    torch.testing.assert_close(turned, next_basis(basis, whole, SEED, 1, "w"))
    found = subspace.energies(basis, parts, of_inputs=True)
    torch.testing.assert_close(found, energies(basis, whole))
