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
from timelyfreeze.policies.pipetransformer import PipeTransformer
from timelyfreeze.policies.policy import Metric, Source


def squares(*rows: list[float]) -> list[dict[Metric, np.ndarray]]:
    return [{Metric.SQUARE_SUM: of_tensors(row)} for row in rows]


def lengths(policy: PipeTransformer, *rows: list[float]) -> list[int]:
    decisions = run(policy, toy_layout(len(rows[0])), squares(*rows))
    for decision in decisions:
        assert decision.metrics == {"frozen_layers": prefix_length(decision.frozen)}
    return [prefix_length(d.frozen) for d in decisions]


@pytest.mark.parametrize("alpha", [0.1, 0.25, 1 / 3, 0.5, 0.9])
@pytest.mark.parametrize("n_layers", [1, 2, 7, 24])
def test_the_bound_is_a_geometric_sequence(n_layers: int, alpha: float) -> None:
    # The last block has the smallest norm, so the argmin never binds: L_T = L (1 - (1 - alpha)^T).
    falling = [float(n_layers - layer) for layer in range(n_layers)]
    found = lengths(PipeTransformer(alpha=alpha), *[falling] * 9)
    closed_form = [n_layers * (1 - (1 - alpha) ** t) for t in range(10)]
    assert found == [math.floor(length + 1e-12) for length in closed_form]


def test_the_closed_form_as_the_paper_prints_it() -> None:
    # (1 - alpha)^T [alpha L / (1 - alpha) + sum over t = 2..T of alpha L / (1 - alpha)^t].
    n_layers, alpha = 24, 0.2
    found = lengths(PipeTransformer(alpha=alpha), *[[float(24 - i) for i in range(24)]] * 8)
    for t in range(1, 9):
        printed = (1 - alpha) ** t * (
            alpha * n_layers / (1 - alpha)
            + sum(alpha * n_layers / (1 - alpha) ** k for k in range(2, t + 1))
        )
        assert found[t] == math.floor(printed + 1e-12)


def test_the_prefix_ends_with_the_block_of_the_smallest_norm() -> None:
    # The bound is 4 of 8 each time; the smallest norm is that of block 1.
    row = [5.0, 1.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    assert lengths(PipeTransformer(alpha=0.5), row) == [0, 2]


def test_the_first_block_can_be_frozen_while_its_norm_is_the_smallest() -> None:
    rising = [float(1 + layer) for layer in range(6)]
    # One live block more at each check. The bound from k is (k + 6) / 2: it binds from k = 4, where
    # it is 5, and from there on the prefix of six layers keeps its last one live.
    assert lengths(PipeTransformer(alpha=0.5), *[rising] * 7) == [0, 1, 2, 3, 4, 5, 5, 5]


def test_frozen_blocks_no_longer_count() -> None:
    # At T = 2 block 0 has no gradient any more; of the live ones block 3 has the smallest.
    rows = [1.0, 9.0, 9.0, 9.0, 9.0, 9.0], [0.0, 9.0, 9.0, 2.0, 9.0, 9.0]
    assert lengths(PipeTransformer(alpha=0.9), *rows) == [0, 1, 4]


def test_a_binding_argmin_is_where_the_bound_goes_on_from() -> None:
    # 8 blocks, alpha 1/4: 2, then 3 by argmin (bound 3.5), then 3 + 5/4 = 4.25, then 5.19.
    falling = [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    rows = [falling, [9.0, 9.0, 0.5, *falling[3:]], falling, falling]
    assert lengths(PipeTransformer(alpha=0.25), *rows) == [0, 2, 3, 4, 5]


def test_norms_that_are_not_finite_change_nothing() -> None:
    falling = [4.0, 3.0, 2.0, 1.0]
    rows = falling, [0.0, 0.0, math.nan, 1.0], [0.0, 0.0, 2.0, math.inf], falling
    # 4 (1 - 1/2) = 2, twice nothing, then 3.
    assert lengths(PipeTransformer(alpha=0.5), *rows) == [0, 2, 2, 2, 3]


@given(
    st.lists(
        st.lists(st.floats(0.0, 3.0), min_size=6, max_size=6),
        min_size=1,
        max_size=8,
    ),
    st.floats(0.05, 0.95),
)
def test_a_prefix_never_shrinks_nor_breaks_the_bound(rows: list, alpha: float) -> None:
    found = lengths(PipeTransformer(alpha=alpha), *rows)
    assert found == sorted(found)
    for t, length in enumerate(found):
        assert length <= 6 * (1 - (1 - alpha) ** t) + 1e-6


def test_a_resumed_run_decides_the_same() -> None:
    rng = np.random.default_rng(0)
    rows = [list(rng.uniform(1.0, 2.0, 12)) for _ in range(8)]
    assert_resumes(PipeTransformer(alpha=0.21), toy_layout(12), squares(*rows))


def test_it_measures_the_gradient_of_one_step() -> None:
    measurement = PipeTransformer().measurement
    assert measurement.source is Source.LAST_GRADIENT
    assert measurement.metrics == (Metric.SQUARE_SUM,)
