"""Estimated steps against what can be worked out by hand, and against simulated optimizers."""

import numpy as np
import pytest

from timelyfreeze.planning.progress import (
    MEASURED_RATIOS,
    merged_curves,
    steps_for_tensors,
    steps_for_tokens,
)
from timelyfreeze.schedule import build_dag, parse_order

DAG = build_dag(parse_order(["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]))
SPLIT = build_dag(parse_order(["0F0 0I0 0W0", "1F0 1I0 1W0"]))


def ratios(of_backwards: dict[str, float]) -> np.ndarray:
    return np.array([of_backwards.get(str(action), 0.0) for action in DAG.actions])


def test_without_freezing_steps_stay() -> None:
    nothing = np.zeros(len(DAG.actions))
    assert steps_for_tensors(DAG, nothing) == 1.0
    assert steps_for_tokens(DAG, nothing, {0: (1.0,) * 9, 1: (1.0,) * 9}) == 1.0


def test_tensors_count_by_the_mean_of_their_stage() -> None:
    half = ratios({"0B0": 1.0, "0B1": 0.0, "1B0": 0.5, "1B1": 0.5})
    assert steps_for_tensors(DAG, half) == pytest.approx(2.0**0.5)
    one = ratios({"0B0": 0.5, "0B1": 0.5})
    assert steps_for_tensors(DAG, one) == pytest.approx(1.5**0.5)


def test_a_stage_that_is_always_frozen_is_no_error() -> None:
    everything = np.where(DAG.freezable, 1.0, 0.0)
    assert 5.0 < steps_for_tensors(DAG, everything) < 20.0


def test_tokens_count_by_the_curve_of_their_stage() -> None:
    curve = {0: tuple(r**2 for r in MEASURED_RATIOS), 1: tuple(MEASURED_RATIOS)}
    plan = ratios({"0B0": 0.4, "1B0": 0.05, "1B1": 0.25})
    wanted = (0.16 + 0.0 + 0.05 + 0.25) / 4
    assert steps_for_tokens(DAG, plan, curve) == pytest.approx((1.0 + wanted) ** 0.5)


def test_of_a_split_backward_the_weight_half_counts() -> None:
    plan = np.array([0.5 if a.kind.value in "IW" else 0.0 for a in SPLIT.actions])
    curves = dict.fromkeys((0, 1), (0.2,) * 9)
    assert steps_for_tokens(SPLIT, plan, curves) == pytest.approx(1.2**0.5)


def test_replicas_count_alike() -> None:
    found = merged_curves([{0: (0.1, 0.3), 1: (9.0,)}, {0: (0.3, 0.5)}])
    assert found == {0: pytest.approx((0.2, 0.4)), 1: (9.0,)}


@pytest.mark.parametrize("frozen", [0.3, 0.5, 0.8])
def test_a_normalized_step_shrinks_as_estimated(frozen: float) -> None:
    """Mean step of an optimizer that divides by the root of the second moment, drawn many times."""
    rng = np.random.default_rng(0)
    n_microbatches, draws = 16, 40_000
    gradients = 0.1 + rng.standard_normal((draws, n_microbatches))
    live = rng.random((draws, n_microbatches)) >= frozen

    def mean_step(sums: np.ndarray) -> float:
        return float(sums.mean() / np.sqrt((sums**2).mean()))

    slower = mean_step(gradients.sum(axis=1)) / mean_step((gradients * live).sum(axis=1))
    every = np.where(DAG.freezable, frozen, 0.0)
    assert slower == pytest.approx(steps_for_tensors(DAG, every), rel=0.1)
