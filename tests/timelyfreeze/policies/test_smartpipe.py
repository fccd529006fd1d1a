import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.timelyfreeze.helpers.toy_model import (
    N_AROUND,
    SHARES,
    assert_resumes,
    of_tensors,
    prefix_length,
    run,
    toy_layout,
)
from timelyfreeze.policies.policy import Decision, Metric, Source
from timelyfreeze.policies.smartpipe import SmartPipe


def metrics(norms: list[float], etas: list[float], before: list[float]) -> dict:
    """What a meter tells of blocks with these norms, whose difference is eta times the last."""
    difference = [eta * norm for eta, norm in zip(etas, before, strict=True)]
    return {
        Metric.SQUARE_SUM: of_tensors(norms),
        Metric.DIFFERENCE_SQUARE_SUM: of_tensors(difference),
    }


def lengths_of(decisions: list[Decision]) -> list[int]:
    found = [prefix_length(d.frozen) for d in decisions]
    assert [d.metrics["frozen_layers"] for d in decisions] == found
    return found


def lengths(policy: SmartPipe, *etas: list[float]) -> list[int]:
    """Frozen blocks from the start on; the first check has nothing to compare with."""
    n_layers = len(etas[0])
    ones = [1.0] * n_layers
    checks = [metrics(ones, ones, ones), *(metrics(ones, row, ones) for row in etas)]
    return lengths_of(run(policy, toy_layout(n_layers), checks))


def from_vectors(policy: SmartPipe, *gradients: list[np.ndarray]) -> list[int]:
    """The same, from the gradients themselves: one vector per tensor and check."""
    n_tensors = len(gradients[0])
    before = [np.zeros_like(vector) for vector in gradients[0]]
    checks = []
    for vectors in gradients:
        checks.append(
            {
                Metric.SQUARE_SUM: np.array([v @ v for v in vectors]),
                Metric.DIFFERENCE_SQUARE_SUM: np.array(
                    [(v - b) @ (v - b) for v, b in zip(vectors, before, strict=True)]
                ),
            }
        )
        before = vectors
    layout = toy_layout((n_tensors - N_AROUND) // len(SHARES))
    return lengths_of(run(policy, layout, checks))


def vectors(n_layers: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=4) for _ in range(N_AROUND + len(SHARES) * n_layers)]


def test_constant_gradients_freeze_as_fast_as_the_rate_allows() -> None:
    g = vectors(8)
    # eta is 0. The first check only remembers; then 4, 6 and 7 of 8.
    assert from_vectors(SmartPipe(tau=0.01, rate=0.5), g, g, g, g, g) == [0, 0, 4, 6, 7, 7]


def test_gradients_that_turn_round_have_an_eta_of_two() -> None:
    g = vectors(8)
    turned = [-v for v in g]
    assert from_vectors(SmartPipe(tau=1.999999, rate=0.5), g, turned, g)[-1] == 0
    assert from_vectors(SmartPipe(tau=2.000001, rate=0.5), g, turned, g)[-1] == 6


def test_unrelated_gradients_have_an_eta_of_about_the_root_of_two() -> None:
    rng = np.random.default_rng(5)
    many = [[rng.normal(size=20000) for _ in range(N_AROUND + len(SHARES) * 4)] for _ in range(2)]
    root = math.sqrt(2)
    assert from_vectors(SmartPipe(tau=root * 0.98, rate=0.5), *many)[-1] == 0
    assert from_vectors(SmartPipe(tau=root * 1.02, rate=0.5), *many)[-1] == 2


def test_candidates_end_at_the_first_block_that_still_changes() -> None:
    policy = SmartPipe(tau=0.5, rate=0.9)
    assert lengths(policy, [0.1, 0.4, 0.6, 0.1, 0.1])[-1] == 2
    assert lengths(policy, [0.5, 0.1, 0.1, 0.1, 0.1])[-1] == 0, "below tau, not at it"


def test_the_rate_caps_growth_as_eq_4_says() -> None:
    # From 0 of 12, a quarter of the live ones: 3, 5.25, 6.94, 8.2.
    still = [0.0] * 12
    assert lengths(SmartPipe(rate=0.25), still, still, still, still) == [0, 0, 3, 5, 6, 8]


def test_a_rate_of_1_leaves_tau_alone_as_in_algorithm_1() -> None:
    # All candidates from the front at once; one block always stays live.
    three = [*[0.0] * 3, *[9.0] * 9]
    still = [0.0] * 12
    assert lengths(SmartPipe(rate=1.0), three, still, still) == [0, 0, 3, 11, 11]


def test_few_candidates_freeze_before_the_cap_does() -> None:
    # Cap 6 of 12, one candidate: 1. Then cap 6.5, three live candidates: 4. Then none: still 4.
    one = [0.0, 9.0, *[0.0] * 10]
    three = [9.0, 0.0, 0.0, 0.0, *[9.0] * 8]
    none = [9.0] * 12
    assert lengths(SmartPipe(rate=0.5), one, three, none) == [0, 0, 1, 4, 4]


def test_the_norm_before_is_what_the_difference_is_measured_by() -> None:
    # The norm falls from 4 to 1 by 3: eta is 0.75, not 3.
    checks = [
        metrics([4.0, 4.0], [1.0, 1.0], [4.0, 4.0]),
        metrics([1.0, 4.0], [0.75, 1.0], [4.0, 4.0]),
    ]
    assert lengths_of(run(SmartPipe(tau=0.8, rate=0.5), toy_layout(2), checks)) == [0, 0, 1]


def test_what_begins_to_move_is_not_stable_and_what_stands_still_is() -> None:
    none, one = [0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0]
    first = metrics(none, [1.0] * 4, none)
    then = metrics(one, [0.0] * 4, none)
    then[Metric.DIFFERENCE_SQUARE_SUM] = of_tensors([0.0, 1.0, 0.0, 0.0])
    decisions = run(SmartPipe(tau=1e6, rate=0.9), toy_layout(4), [first, then])
    assert lengths_of(decisions) == [0, 0, 1]


def test_norms_that_are_not_finite_freeze_nothing() -> None:
    policy = SmartPipe(rate=0.5)
    assert lengths(policy, [math.nan] * 4, [0.0] * 4) == [0, 0, 0, 2]


@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 0.5, 0.99, 1.0, 3.0]), min_size=6, max_size=6),
        min_size=1,
        max_size=8,
    ),
    st.floats(0.05, 0.95),
)
def test_a_prefix_never_shrinks_nor_breaks_the_cap(rows: list, rate: float) -> None:
    found = lengths(SmartPipe(rate=rate), *rows)
    assert found == sorted(found)
    for k, length in enumerate(found[1:]):
        assert length <= 6 * (1 - (1 - rate) ** k) + 1e-6


def test_a_resumed_run_decides_the_same() -> None:
    rng = np.random.default_rng(0)
    ones = [1.0] * 12
    rows = [list(rng.uniform(0.0, 1.3, 12)) for _ in range(8)]
    assert_resumes(SmartPipe(rate=0.21), toy_layout(12), [metrics(ones, r, ones) for r in rows])


def test_it_measures_sums_of_gradients_and_their_difference() -> None:
    measurement = SmartPipe().measurement
    assert measurement.source is Source.GRADIENTS
    assert set(measurement.metrics) == {Metric.SQUARE_SUM, Metric.DIFFERENCE_SQUARE_SUM}
