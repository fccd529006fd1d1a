import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timelyfreeze.helpers.programs import random_program
from timelyfreeze.planning.program import FreezeLp, PrecedenceRows, build_lp
from timelyfreeze.schedule.dag import PipelineDag, build_dag, makespan, start_times
from timelyfreeze.schedule.order import parse_order
from timelyfreeze.timing.bounds import DurationBounds

seeds = st.integers(0, 10**6)


def some_ratios(lp: FreezeLp, seed: int) -> np.ndarray:
    """Ratios from nothing to all, 0 where freezing saves nothing."""
    rng = np.random.default_rng(seed)
    ratios = rng.choice([0.0, 0.25, 0.5, 1.0], len(lp.freezable))
    return ratios * lp.column_upper[lp.n_actions + 1 :]


def durations(
    dag: PipelineDag, bounds: DurationBounds, lp: FreezeLp, ratios: np.ndarray
) -> np.ndarray:
    of_actions = np.zeros(len(dag.actions))
    of_actions[lp.freezable] = ratios
    return (bounds.max_ms - of_actions * (bounds.max_ms - bounds.min_ms)) / lp.scale_ms


@given(seeds, seeds)
def test_earliest_starts_are_those_of_the_graph(seed: int, other: int) -> None:
    dag, bounds, caps = random_program(seed)
    lp = build_lp(dag, bounds, caps)
    ratios = some_ratios(lp, other)
    found = PrecedenceRows(lp).earliest(ratios)
    of_actions = durations(dag, bounds, lp, ratios)
    assert found[:-1] == pytest.approx(start_times(dag, of_actions), abs=1e-12)
    assert found[-1] == pytest.approx(makespan(dag, of_actions), abs=1e-12)


@given(seeds, seeds)
def test_latest_starts_end_in_time_and_are_latest(seed: int, other: int) -> None:
    dag, bounds, caps = random_program(seed)
    lp = build_lp(dag, bounds, caps)
    ratios = some_ratios(lp, other)
    rows = PrecedenceRows(lp)
    end = rows.earliest(ratios)[-1]
    latest = rows.latest(ratios, end)
    of_actions = durations(dag, bounds, lp, ratios)
    # What starts then ends before the latest start of all that follows, and of some just then.
    ends = latest[:-1] + of_actions
    following = np.full(len(ends), end)
    for before, after in dag.edges.tolist():
        following[before] = min(following[before], latest[after])
    assert ends == pytest.approx(following, abs=1e-12)


@given(seeds, seeds, st.booleans())
def test_unfreezing_costs_no_time_and_leaves_nothing_to_unfreeze(
    seed: int, other: int, whole: bool
) -> None:
    dag, bounds, caps = random_program(seed)
    lp = build_lp(dag, bounds, caps)
    rows = PrecedenceRows(lp)
    ratios = some_ratios(lp, other)
    may_fall = np.random.default_rng(other).random(len(ratios)) < 0.7
    lowered = rows.unfreeze(ratios, may_fall, whole=whole)
    end = makespan(dag, durations(dag, bounds, lp, ratios))
    assert (lowered <= ratios).all()
    assert (lowered >= 0.0).all()
    assert (lowered[~may_fall] == ratios[~may_fall]).all()
    assert makespan(dag, durations(dag, bounds, lp, lowered)) <= end + 1e-8
    if whole:
        assert ((lowered == ratios) | (lowered == 0.0)).all()
    for i in np.flatnonzero(may_fall & (lowered > 0.0)):
        less = lowered.copy()
        less[i] = 0.0 if whole else lowered[i] - 1e-4
        if less[i] >= 0.0:
            assert makespan(dag, durations(dag, bounds, lp, less)) > end + 1e-9


def test_unfreezes_by_hand() -> None:
    # 0W0 ends at 4 frozen whole; 1W0 begins at 3 and may take 1 of its 2 ms: half is enough.
    dag = build_dag(parse_order(["0F0 0I0 0W0", "1F0 1I0 1W0"]))
    high = np.where([a.kind.value == "W" for a in dag.actions], 2.0, 1.0)
    lp = build_lp(dag, DurationBounds(np.where(dag.freezable, 0.0, high), high), 1.0)
    rows = PrecedenceRows(lp)
    both = np.array([True, True])
    assert rows.unfreeze(np.array([1.0, 1.0]), both).tolist() == [1.0, 0.5]
    assert rows.unfreeze(np.array([1.0, 1.0]), both, whole=True).tolist() == [1.0, 1.0]
    assert rows.unfreeze(np.array([0.5, 1.0]), both, whole=True).tolist() == [0.5, 0.0]


@given(seeds, seeds)
def test_raised_duals_swallow_nothing(seed: int, other: int) -> None:
    dag, bounds, caps = random_program(seed)
    lp = build_lp(dag, bounds, caps)
    rng = np.random.default_rng(other)
    duals = rng.choice([0.0, 0.01, 1.0], lp.n_precedence)
    raised = PrecedenceRows(lp).raised(duals)
    assert (raised >= duals).all()
    row = np.repeat(np.arange(lp.n_precedence), np.diff(lp.row_start[: lp.n_precedence + 1]))
    of_times = lp.columns[: len(row)] < lp.n_actions
    arriving_less_leaving = np.bincount(
        lp.columns[: len(row)][of_times], (lp.values[: len(row)] * raised[row])[of_times]
    )
    assert (arriving_less_leaving <= 1e-9).all()
