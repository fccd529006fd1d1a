"""The first estimate of ranks, against the formula of the estimate by hand."""

import math

import pytest

from timelyfreeze.control.dimensions import times_of_dimensions
from timelyfreeze.timing import Energies

# Of two processes: energy inside and in all, inner products inside and in all.
FEW = Energies(30.0, 100.0, 5.0, 10.0), Energies(10.0, 60.0, 3.0, 10.0)
MANY = Energies(60.0, 100.0, 9.0, 10.0), Energies(36.0, 60.0, 9.0, 10.0)
ENERGIES = [{16: few, 64: many} for few, many in zip(FEW, MANY, strict=True)]


def by_hand(captured: float, mean: float, cost: float) -> float:
    steps = math.sqrt(1.0 - 0.5 * (1.0 - captured)) / (1.0 - 0.5 * (1.0 - mean))
    return (1.0 - 0.5 * (1.0 - cost) / 3.0) * max(steps, 1.0)


def test_more_directions_cost_more_and_need_fewer_steps() -> None:
    shares = [(1000.0, 200_000.0), (600.0, 120_000.0)]  # rank 1 costs 1 / 200
    times = times_of_dimensions(ENERGIES, shares)
    assert times == pytest.approx(
        {16: by_hand(40 / 160, 0.4, 16 / 200), 64: by_hand(96 / 160, 0.9, 64 / 200)}
    )
    assert times[64] < times[16]
    narrow = times_of_dimensions(ENERGIES, [(1000.0, 64_000.0), (600.0, 38_400.0)])
    assert narrow[64] == pytest.approx(by_hand(0.6, 0.9, 1.0)), "nothing is saved"


@pytest.mark.parametrize("inside", [-1.0, 11.0, math.nan])
def test_nothing_is_said_where_noise_prevails(inside: float) -> None:
    noise = {16: Energies(1.0, 2.0, inside, 10.0), 64: MANY[0]}
    assert times_of_dimensions([noise], [(1.0, 200.0)]) == {}
    assert times_of_dimensions([{16: Energies(), 64: Energies()}], [(0.0, 0.0)]) == {}
