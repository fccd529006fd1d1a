"""Parts of energy and of the mean gradient in a subspace, against gradients made of both."""

from contextlib import nullcontext
from dataclasses import astuple

import pytest
import torch
from torch import nn

from timelyfreeze.runtime.linear import LinearGroup
from timelyfreeze.runtime.low_rank import Subspaces
from timelyfreeze.settings import PhaseSchedule
from timelyfreeze.timing import Energies

SEED, RANK, NOISE, PART = 3, 4, 3.0, 0.6


class Layer:
    """Layers of one weight, whose gradients have PART of their mean in Q, and noise."""

    def __init__(self, rows: int, columns: int) -> None:
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.zeros(rows, columns))
        self.basis = torch.linalg.qr(torch.randn(min(rows, columns), RANK)).Q
        whole = torch.randn(rows, columns)
        layer = nn.Linear(columns, rows)
        layer.weight = self.weight
        self.groups, self.bases = [LinearGroup([layer], ["w"])], {"w": self.basis}
        self.timed_update = nullcontext
        q = self.basis @ self.basis.t()
        inside = whole @ q if columns <= rows else q @ whole
        outside = whole - inside
        self.mean = (
            PART**0.5 * inside / inside.norm() + (1 - PART) ** 0.5 * outside / outside.norm()
        )

    def load(self, bases: dict[str, torch.Tensor]) -> None:
        self.bases.update(bases)

    def draw(self) -> None:
        noise = torch.randn_like(self.mean)
        self.weight.grad = self.mean + NOISE * noise / noise.norm()


@pytest.mark.parametrize("shape", [(60, 40), (40, 60)])
def test_what_batches_agree_on_is_the_mean_gradient(shape: tuple[int, int]) -> None:
    layer = Layer(*shape)
    meter = Subspaces([layer], SEED, [RANK])  # type: ignore[list-item]
    of_mean, of_energy = [], []
    for _ in range(400):
        layer.draw()
        found = meter.energies()
        of_energy.append(found.captured)
        of_mean.append((found.agreed_inside, found.agreed))
    of_mean = torch.tensor(of_mean[2:]).mean(0)
    assert of_mean[0] / of_mean[1] == pytest.approx(PART, abs=0.06)
    noise = RANK / 40  # the part of noise that lies in any subspace
    expected = (PART + NOISE**2 * noise) / (1.0 + NOISE**2)
    assert sum(of_energy) / len(of_energy) == pytest.approx(expected, abs=0.02)


def test_the_first_directions_do_not_count_and_nothing_agrees_with_a_gap() -> None:
    layer = Layer(60, 40)
    meter = Subspaces([layer], SEED, [RANK])  # type: ignore[list-item]

    def agreed() -> float:
        layer.draw()
        return meter.energies().agreed

    assert [agreed(), agreed()] == [0.0, 0.0]
    assert not meter.knows_energies
    third = agreed()
    assert meter.knows_energies
    assert third != 0.0
    for step in (4, 5):
        meter.begin_step(PhaseSchedule.unplanned(0).at(step))
    assert agreed() == pytest.approx(0.9 * third)


def test_a_meter_goes_on_from_a_checkpoint() -> None:
    layer = Layer(60, 40)
    meter = Subspaces([layer], SEED, [RANK])  # type: ignore[list-item]
    for _ in range(3):
        layer.draw()
        meter.energies()
    saved = meter.tensors()
    other = Subspaces([layer], SEED, [RANK])  # type: ignore[list-item]
    assert {n: t.shape for n, t in other.tensors().items()} == {
        n: t.shape for n, t in saved.items()
    }
    other.load(saved)
    layer.draw()
    after = [each.energies() for each in (meter, other)]
    assert after[0] == after[1]


def test_squares_and_products_are_those_of_weights() -> None:
    layers = [Layer(60, 40), Layer(40, 60)]
    meters = [Subspaces(found, SEED, [RANK]) for found in ([layers[0]], [layers[1]], layers)]  # type: ignore[list-item]
    layers[1].groups = [LinearGroup(layers[1].groups[0].layers, ["v"])]
    layers[1].bases = {"v": layers[1].basis}
    for _ in range(4):
        for layer in layers:
            layer.draw()
        *one_by_one, both = (meter.energies() for meter in meters)
    for each in one_by_one:
        squares = (each.agreed_inside**2, each.agreed**2, each.agreed_inside * each.agreed)
        assert astuple(each)[4:] == pytest.approx(squares, rel=1e-5)
    assert astuple(both) == pytest.approx(astuple(Energies.total(one_by_one)), rel=1e-5)
