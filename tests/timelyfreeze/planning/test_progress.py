"""Estimated steps against what can be worked out by hand, and against simulated optimizers."""

import numpy as np
import pytest

from timelyfreeze.planning.solution import steps_factor
from timelyfreeze.schedule import build_dag, parse_order

DAG = build_dag(parse_order(["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]))
SPLIT = build_dag(parse_order(["0F0 0I0 0W0", "1F0 1I0 1W0"]))


def ratios(of_backwards: dict[str, float]) -> np.ndarray:
    return np.array([of_backwards.get(str(action), 0.0) for action in DAG.actions])


def test_without_freezing_steps_stay() -> None:
    nothing = np.zeros(len(DAG.actions))
    assert steps_factor(DAG, nothing) == 1.0


def test_tensors_count_by_the_mean_of_their_stage() -> None:
    half = ratios({"0B0": 1.0, "0B1": 0.0, "1B0": 0.5, "1B1": 0.5})
    assert steps_factor(DAG, half) == pytest.approx(2.0**0.5)
    one = ratios({"0B0": 0.5, "0B1": 0.5})
    assert steps_factor(DAG, one) == pytest.approx(1.5**0.5)


def test_what_frozen_weights_keep_is_not_lost() -> None:
    every = np.where(DAG.freezable, 0.5, 0.0)
    assert steps_factor(DAG, every, 0.5, 0.5) == pytest.approx((1.0 + 0.25 / 0.75) ** 0.5)
    assert steps_factor(DAG, every, 1.0, 1.0) == 1.0
    assert steps_factor(DAG, every, 0.4, 0.6) == pytest.approx(0.7**0.5 / 0.8)
    assert steps_factor(DAG, every, 0.2, 0.9) == 1.0, "less noise is no promise of fewer steps"


@pytest.mark.parametrize("frozen", [0.3, 0.7])
def test_a_step_in_subspaces_shrinks_as_estimated(frozen: float) -> None:
    """50 weights, a subspace of 20 that has two thirds of the mean gradient, noise alike in all."""
    rng = np.random.default_rng(0)
    n, inside, n_microbatches, draws = 50, 20, 8, 4000
    mean = np.where(np.arange(n) < inside, (2 / 3 / inside) ** 0.5, (1 / 3 / (n - inside)) ** 0.5)
    gradients = 0.3 * mean + rng.standard_normal((draws, n_microbatches, n))
    live = rng.random((draws, n_microbatches, 1)) >= frozen
    kept = gradients * (live | (np.arange(n) < inside))

    def progress(sums: np.ndarray) -> float:
        return float((sums @ mean).mean() / np.sqrt((sums**2).sum(axis=1).mean()))

    slower = progress(gradients.sum(axis=1)) / progress(kept.sum(axis=1))
    every = np.where(DAG.freezable, frozen, 0.0)
    assert slower == pytest.approx(steps_factor(DAG, every, inside / n, 2 / 3), rel=0.05)


def test_a_stage_that_is_always_frozen_is_no_error() -> None:
    everything = np.where(DAG.freezable, 1.0, 0.0)
    assert 5.0 < steps_factor(DAG, everything) < 20.0


def test_of_a_split_backward_the_weight_half_counts() -> None:
    plan = np.array([{"I": 0.1, "W": 0.5}.get(a.kind.value, 0.0) for a in SPLIT.actions])
    assert steps_factor(SPLIT, plan) == pytest.approx(2.0**0.5)


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
    assert slower == pytest.approx(steps_factor(DAG, every), rel=0.1)
