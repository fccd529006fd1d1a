"""The ways to solve, held to each other on a pipeline that all of them can manage."""

import numpy as np
import pytest
from solver_tries import WAYS, make_case, time_ways

from timelyfreeze.planning import simplex as lp_simplex


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_keeps_the_budgets_and_comes_near_the_optimum(way: str, schedule: str) -> None:
    case = make_case(schedule, 3, 12)
    best_ms = case.batch_ms(lp_simplex.solve_by_simplex(case.lp, 60.0))
    ratios = WAYS[way](case)
    frozen = np.bincount(case.dag.stages[case.lp.freezable], ratios, case.dag.n_stages)
    assert (frozen <= case.lp.caps * (1.0 + 1e-4)).all()
    assert -1e-4 < ratios.min() <= ratios.max() < 1.0 + 1e-4
    found_ms = case.batch_ms(ratios)
    assert found_ms >= best_ms * (1.0 - 1e-4)
    assert found_ms <= best_ms * 1.001


def test_the_case_is_what_the_docs_say() -> None:
    case = make_case("1F1B", 4, 8, noise=0.0)
    freezable, first = case.dag.freezable, case.dag.stages == 0
    assert set(case.bounds.max_ms[freezable]) == {2.0}
    assert set(case.bounds.min_ms[freezable & ~first]) == {1.0}
    assert set(case.bounds.min_ms[freezable & first]) == {0.0}
    assert set(case.bounds.max_ms[~freezable]) == {1.0}
    with pytest.raises(ValueError, match="'2F2B' is no schedule"):
        make_case("2F2B", 4, 8)


def test_rows_of_the_table() -> None:
    rows = time_ways(make_case("GPipe", 2, 4), list(WAYS), 60.0)
    assert [row["solver"] for row in rows] == list(WAYS)
    for row in rows:
        # 2 x 7 edges along the ranks, 4 + 4 across, one from the last backward to the end, 2
        # budgets.
        assert (row["actions"], row["rows"]) == (16, 14 + 8 + 1 + 2)
        assert float(row["above"].rstrip("%")) < 0.1


def test_a_solver_that_takes_too_long_is_ended_and_told() -> None:
    (row,) = time_ways(make_case("1F1B", 16, 128), ["simplex"], 0.01)
    assert row["s"] == "no answer in 0.01"
