import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timelyfreeze.helpers.toy_model import (
    assert_resumes,
    of_tensors,
    prefix_length,
    run,
    toy_layout,
)
from timelyfreeze.policies.autofreeze import AutoFreeze
from timelyfreeze.policies.policy import Metric, Source

norms = st.lists(st.sampled_from([0.0, 0.1, 0.9, 1.0, 1.1, 5.0]), min_size=5, max_size=5)


def squares(*rows: list[float]) -> list[dict[Metric, np.ndarray]]:
    return [{Metric.SQUARE_SUM: of_tensors(row)} for row in rows]


def lengths(policy: AutoFreeze, *rows: list[float]) -> list[int]:
    layout = toy_layout(len(rows[0]))
    decisions = run(policy, layout, squares(*rows))
    for decision in decisions:
        assert decision.metrics["frozen_layers"] == prefix_length(decision.frozen)
    return [prefix_length(d.frozen) for d in decisions]


def test_front_blocks_below_the_median_freeze_up_to_the_first_that_is_not() -> None:
    # eta = 0.1, 0.2, 0.5, 0.3, 0.9; the median is 0.3: blocks 0 and 1, 2 stands in front of 3.
    assert lengths(AutoFreeze(), [10.0] * 5, [9.0, 8.0, 5.0, 7.0, 1.0]) == [0, 0, 2]


def test_the_change_of_the_first_live_block_and_the_limit_are_told() -> None:
    rows = squares([10.0] * 5, [9.0, 8.0, 5.0, 7.0, 1.0])
    decisions = run(AutoFreeze(), toy_layout(5), rows)
    assert decisions[1].metrics == {"frozen_layers": 0}
    assert decisions[2].metrics == {
        "frozen_layers": 2,
        "eta_of_first_live_layer": pytest.approx(0.1),
        "eta_limit": pytest.approx(0.3),
    }


def test_a_block_below_the_percentile_behind_a_live_one_stays_live() -> None:
    # eta = 0.9, 0.1, 0.1, 0.8, 0.5: the first is above the median of 0.5.
    assert lengths(AutoFreeze(), [10.0] * 5, [1.0, 9.0, 11.0, 2.0, 5.0]) == [0, 0, 0]


def test_the_percentile_is_interpolated() -> None:
    # eta = 0.1, 0.2, 0.3, 0.4. 50th: 0.25, two blocks. 80th: 0.34, three. 10th: 0.13, one.
    rows = [10.0] * 4, [9.0, 8.0, 7.0, 6.0]
    found = [lengths(AutoFreeze(percentile=p), *rows)[-1] for p in (0, 10, 50, 80, 100)]
    assert found == [0, 1, 2, 3, 3]


def test_the_percentile_is_of_the_live_blocks_only() -> None:
    # Two freeze at K = 2. Then eta of the live is 0.1, 0.5, 0.9 (median 0.5): one more. With the
    # frozen blocks' eta of 1 (10 to 0) the median of all five would be 0.9, and two would freeze.
    first = [[10.0] * 5, [9.0, 8.0, 5.0, 7.0, 1.0]]
    assert lengths(AutoFreeze(), *first, [0.0, 0.0, 4.5, 3.5, 0.1]) == [0, 0, 2, 3]


def test_norms_are_compared_with_those_of_the_check_before() -> None:
    # Live at K = 3: 5 to 9, 7 to 6, 1 to 1, so eta = 0.8, 0.14, 0. The first is not below the
    # median. Compared with K = 1, or with the wrong blocks, it would be.
    first = [[10.0] * 5, [9.0, 8.0, 5.0, 7.0, 1.0]]
    assert lengths(AutoFreeze(), *first, [0.0, 0.0, 9.0, 6.0, 1.0]) == [0, 0, 2, 2]


def test_growing_norms_count_by_their_size_or_by_their_sign() -> None:
    # Signed, (before - now) / before: -0.5, 0.1, 0.2; absolute 0.5, 0.1, 0.2.
    rows = [10.0] * 3, [15.0, 9.0, 8.0]
    assert lengths(AutoFreeze(), *rows)[-1] == 0
    assert lengths(AutoFreeze(change="signed"), *rows)[-1] == 1


@pytest.mark.parametrize("change", ["absolute", "signed"])
def test_what_begins_to_move_is_not_stable_and_what_stands_still_is(change: str) -> None:
    policy = AutoFreeze(change=change)
    # 0 to 0 is no change; 0.1 and 0.2 follow, and the median lies between: two.
    assert lengths(policy, [0.0, 10.0, 10.0, 10.0], [0.0, 9.0, 8.0, 7.0])[-1] == 2
    assert lengths(policy, [0.0, 10.0, 10.0, 10.0], [1.0, 9.0, 8.0, 7.0])[-1] == 0
    # Several of them do not upset the percentile: eta = 0.1, 0.2, then three out of all bounds.
    rows = [10.0, 10.0, 0.0, 0.0, 0.0], [9.0, 8.0, 1.0, 1.0, 1.0]
    assert lengths(policy, *rows)[-1] == 2


def test_one_block_stays_live_however_often_it_is_checked() -> None:
    rows = [[10.0 - k * (1 + layer / 10) for layer in range(4)] for k in range(8)]
    assert lengths(AutoFreeze(percentile=100.0), *rows)[-1] == 3


def test_norms_that_are_not_finite_freeze_nothing() -> None:
    bad = [9.0, 8.0, math.nan, 7.0]
    assert lengths(AutoFreeze(), [10.0] * 4, bad, [10.0] * 4, [9.0, 8.0, 7.0, 6.0]) == [
        *[0, 0, 0, 0],
        2,
    ]


@given(st.lists(norms, min_size=2, max_size=6), st.sampled_from([25.0, 50.0, 80.0]))
def test_a_prefix_never_shrinks(rows: list[list[float]], percentile: float) -> None:
    for change in ("absolute", "signed"):
        found = lengths(AutoFreeze(percentile=percentile, change=change), *rows)
        assert found == sorted(found)
        assert found[-1] < 5


def test_a_resumed_run_decides_the_same() -> None:
    rng = np.random.default_rng(0)
    rows = [list(rng.uniform(1.0, 2.0, 12)) for _ in range(8)]
    assert_resumes(AutoFreeze(), toy_layout(12), squares(*rows))


def test_it_measures_what_delta_says() -> None:
    assert AutoFreeze().measurement.source is Source.GRADIENTS
    assert AutoFreeze(delta="updates").measurement.source is Source.UPDATES
    assert AutoFreeze().measurement.metrics == (Metric.SQUARE_SUM,)


@pytest.mark.parametrize(
    ("n_steps", "checks", "interval"),
    [(406.27, 5, 81), (406.27, 2, 203), (3.0, 5, 1), (406.27, 0, 50)],
)
def test_checks_of_an_epoch_give_the_interval(n_steps: float, checks: int, interval: int) -> None:
    """52,002 rows over 128 are 406.27 steps: one check in 81.25 of them for five."""
    assert AutoFreeze(checks_per_epoch=checks).in_epochs_of(n_steps).check_interval == interval
