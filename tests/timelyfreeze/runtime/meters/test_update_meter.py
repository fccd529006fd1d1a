"""Two tensors of energies 25 and 4, seen by a meter, with masks by hand."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from timelyfreeze.policies.selection import build_parameter_table
from timelyfreeze.runtime.meters.update_meter import GradientEnergy, UpdateMeter, frozen_counts
from timelyfreeze.settings.phases import Phase, Step

TABLES = {1: build_parameter_table([("a", 2), ("b", 4)])}


def meter() -> tuple[UpdateMeter, list[Tensor]]:
    tensors = [torch.zeros(2), torch.zeros(4)]
    tensors[0].grad = torch.tensor([3.0, 4.0])
    tensors[1].grad = torch.ones(4)
    return UpdateMeter(TABLES, 2, GradientEnergy({1: tensors})), tensors


def step(to: UpdateMeter, number: int, phase: Phase, *frozen: list[bool]) -> None:
    is_first = phase is not to._step.phase
    to.begin_step(Step(number, phase, is_first))
    to.end_batch(0, {1: {m: np.array(mask) for m, mask in enumerate(frozen)}})


def p_eff(to: UpdateMeter, scale: float | None = 1.0, ratio: float | None = None) -> float | None:
    to.drawn_ratio = lambda stage: ratio
    energy = to.collect(scale)["updates"].energy
    assert energy is not None
    return energy.p_eff


def test_p_eff_of_masks_since_the_last_time() -> None:
    updates, _ = meter()
    step(updates, 1, Phase.WARMUP)
    assert p_eff(updates) == 1.0
    step(updates, 2, Phase.STABLE, [True, False], [True, False])
    updates.end_step(Step(2))
    step(updates, 3, Phase.STABLE, [True, False], [False, True])
    # a was updated in 1 of 4 backwards, b in 3 of 4.
    assert p_eff(updates) == pytest.approx((25 / 4 + 4 * 3 / 4) / 29)


def test_where_tensors_are_drawn_the_probability_counts_and_not_the_draw() -> None:
    updates, _ = meter()
    step(updates, 1, Phase.WARMUP)
    p_eff(updates)
    step(updates, 2, Phase.STABLE, [True, True], [True, False])
    assert p_eff(updates, ratio=0.625) == pytest.approx(0.375)


def test_a_steps_masks_meet_the_energies_from_before_it() -> None:
    """What is left of a gradient, made up for, goes together with how much of it was frozen."""
    updates, tensors = meter()
    step(updates, 1, Phase.WARMUP)
    p_eff(updates)
    tensors[0].grad = torch.tensor([30.0, 40.0])
    step(updates, 2, Phase.STABLE, [True, False])
    assert p_eff(updates) == pytest.approx((25 / 2 + 4) / 29)
    step(updates, 3, Phase.STABLE, [False, True])
    # Energies are now (25 + 2500 * 4) / 2 and (4 + 4) / 2.
    assert p_eff(updates) == pytest.approx((5012.5 + 2) / 5016.5)


def test_what_was_never_live_leaves_p_eff_unknown() -> None:
    updates, _ = meter()
    step(updates, 1, Phase.STABLE, [True, False], [True, False])
    assert p_eff(updates) is None


def test_without_gradients_the_last_energies_count() -> None:
    updates, tensors = meter()
    step(updates, 1, Phase.WARMUP)
    p_eff(updates)
    tensors[0].grad = None
    step(updates, 2, Phase.STABLE, [True, False], [True, False])
    assert p_eff(updates, scale=None) == pytest.approx(4 / 29)
    assert UpdateMeter(TABLES, 2, None).collect(1.0)["updates"].energy is None


def test_counts_of_all_ranks_are_put_together_by_stage() -> None:
    first, again = meter()[0], meter()[0]
    for updates in (first, again):  # replicas
        step(updates, 1, Phase.RAMP, [True, False])
    other = UpdateMeter({0: build_parameter_table([("c", 9)])}, 2, None)
    other.begin_step(Step(1, Phase.RAMP))
    other.end_batch(0, {0: {}})
    rows = frozen_counts([first.counts(), other.counts(), again.counts()], [1, 0])
    assert [(r.rank, r.stage, r.parameter, r.elements) for r in rows] == [
        (1, 0, "c", 9),
        (0, 1, "a", 2),
        (0, 1, "b", 4),
    ]
    assert [(r.backwards, r.times_frozen) for r in rows] == [(2, 0), (2, 1), (2, 0)]


def test_the_state_comes_back_also_where_no_energy_was_measured() -> None:
    updates, _ = meter()
    step(updates, 1, Phase.STABLE, [True, False], [True, False])
    p_eff(updates)
    other, tensors = meter()
    for tensor in tensors:
        tensor.grad = None
    other.load_plain_state(updates.plain_state())
    assert other.counts()[1][1].frozen.tolist() == [2, 0]
    energy = other.collect(None)["updates"].energy
    assert energy is not None
    assert (energy.total, energy.p_eff) == (4.0, None)
    other.load_plain_state({k: v for k, v in updates.plain_state().items() if k != "energy"})
    assert math.isnan(other.plain_state()["energy"]["1"][0] or math.nan)
