import logging
import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import clarabel
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import timelyfreeze.planning.lp
from tests.timelyfreeze.helpers.programs import (
    CAPS,
    SCHEDULES,
    equal_bounds,
    noisy_bounds,
    random_program,
    scheduled,
)
from timelyfreeze.planning.interior_point import (
    FREEZING_COST,
    CertifiedRatios,
    solve_by_interior_point,
)
from timelyfreeze.planning.lp import solve_freeze_ratios
from timelyfreeze.planning.program import FreezeLp, LpError, build_lp
from timelyfreeze.planning.simplex import solve_by_simplex
from timelyfreeze.schedule.dag import PipelineDag, build_dag, makespan
from timelyfreeze.schedule.order import one_f_one_b_order
from timelyfreeze.timing.bounds import DurationBounds

pytestmark = pytest.mark.slow

seeds = st.integers(0, 10**6)


def batch(dag: PipelineDag, bounds: DurationBounds, lp: FreezeLp, ratios: np.ndarray) -> float:
    of_actions = np.zeros(len(dag.actions))
    of_actions[lp.freezable] = ratios
    # Frozen whole, what rounding leaves of a duration may be below 0.
    durations = bounds.max_ms - of_actions * (bounds.max_ms - bounds.min_ms)
    return makespan(dag, np.maximum(durations, 0.0), bounds.delays_ms(dag))


def check_as_good_as_simplex(dag: PipelineDag, bounds: DurationBounds, lp: FreezeLp) -> None:
    """Every constraint kept; as short as the exact optimum but for the cost of freezing, which is
    at most 0.01% of the unfrozen batch; and freezing as little, to 0.1%.
    """
    certified = solve_by_interior_point(lp, 60.0)
    found = certified.ratios
    exact = solve_by_simplex(lp, 60.0)
    ratio = slice(lp.n_actions + 1, None)
    assert (found >= lp.column_lower[ratio]).all()
    assert (found <= lp.column_upper[ratio]).all()
    frozen = np.bincount(dag.stages[lp.freezable], found, dag.n_stages)
    assert (frozen <= lp.caps + 1e-9).all()
    best_ms = batch(dag, bounds, lp, exact)
    unfrozen_ms = batch(dag, bounds, lp, np.zeros(len(found)))
    assert batch(dag, bounds, lp, found) <= best_ms * (1.0 + 1e-5) + FREEZING_COST * unfrozen_ms
    # The certificate is true, and good enough for the plan to be handed on.
    assert certified.bound * lp.scale_ms <= best_ms * (1.0 + 1e-9)
    assert certified.end <= certified.bound * 1.001
    # The cost of freezing may buy less of it for time, and never more.
    assert found.sum() <= exact.sum() * (1.0 + 1e-3) + 1e-3


@given(seeds)
def test_random_pipelines_and_caps(seed: int) -> None:
    dag, bounds, caps = random_program(seed)
    check_as_good_as_simplex(dag, bounds, build_lp(dag, bounds, caps))


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule(name: str, cap: float) -> None:
    dag = scheduled(name, 4, 12)
    for bounds in (noisy_bounds(dag, 0), equal_bounds(dag)):
        check_as_good_as_simplex(dag, bounds, build_lp(dag, bounds, cap))


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZBVZeroBubble"])
def test_a_few_hundred_actions(name: str) -> None:
    dag = scheduled(name, 8, 32)
    bounds = noisy_bounds(dag, 1)
    check_as_good_as_simplex(dag, bounds, build_lp(dag, bounds, 0.8))


def odd_bounds(dag: PipelineDag) -> dict[str, DurationBounds]:
    """Durations that are hard on solvers."""
    rng, usual = np.random.default_rng(3), noisy_bounds(dag, 3)
    n, freezable = len(dag.actions), dag.freezable
    zero, decades = rng.random(n) < 0.3, 10.0 ** rng.uniform(-3.0, 3.0, n)
    slow = np.where(dag.ranks == dag.ranks.max(), 10.0, 1.0)
    low, high = usual.min_ms, usual.max_ms
    return {
        "nothing to save": DurationBounds(high.copy(), high),
        "a hair to save": DurationBounds(np.where(freezable, high * (1.0 - 1e-4), high), high),
        "nothing left": DurationBounds(np.where(freezable, 0.0, high), high),
        "some last 0 ms": DurationBounds(np.where(zero, 0.0, low), np.where(zero, 0.0, high)),
        "decades": DurationBounds(
            np.where(freezable, decades * rng.choice([0.0, 0.5, 1.0], n), decades), decades
        ),
        "a slow rank": DurationBounds(low * slow, high * slow),
    }


@pytest.mark.parametrize("kind", odd_bounds(scheduled("1F1B", 2, 2)))
@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_odd_durations_with_slow_and_fast_links(name: str, kind: str) -> None:
    dag = scheduled(name, 4, 12)
    rng = np.random.default_rng(4)
    links = {(a, b) for a, b in dag.ranks[dag.edges].tolist() if a != b}
    bounds = odd_bounds(dag)[kind]
    ways_ms = {link: rng.choice([0.0, 0.1, 20.0]) * bounds.max_ms.mean() for link in sorted(links)}
    for cap in (1.0, rng.choice([0.0, 0.01, 0.5, 1.0], dag.n_stages).tolist()):
        linked = replace(bounds, p2p_latency_ms=ways_ms)
        check_as_good_as_simplex(dag, linked, build_lp(dag, linked, cap))


@given(seeds)
def test_some_ratios_decided_beforehand(seed: int) -> None:
    dag, bounds, caps = random_program(seed)
    lp = build_lp(dag, bounds, caps)
    rng = np.random.default_rng(seed)
    lower, upper = lp.column_lower.copy(), lp.column_upper.copy()
    for stage, cap in enumerate(lp.caps.tolist()):
        members = np.flatnonzero((dag.stages[lp.freezable] == stage) & (rng.random() < 0.5))
        values = (np.arange(len(members)) < int(cap)).astype(float)
        lower[lp.n_actions + 1 + members] = upper[lp.n_actions + 1 + members] = values
    check_as_good_as_simplex(dag, bounds, replace(lp, column_lower=lower, column_upper=upper))


@pytest.mark.parametrize("n_processors", [1.0, 2.5])
def test_ranks_that_share_processors(n_processors: float) -> None:
    dag = scheduled("1F1B", 4, 8)
    bounds = noisy_bounds(dag, 2)
    lp = build_lp(dag, bounds, 0.7, n_processors)
    found, exact = solve_by_interior_point(lp, 60.0).ratios, solve_by_simplex(lp, 60.0)

    def end(ratios: np.ndarray) -> float:
        saved = ratios * (bounds.max_ms - bounds.min_ms)[lp.freezable]
        work = (bounds.max_ms.sum() - saved.sum()) / n_processors
        return max(batch(dag, bounds, lp, ratios), work)

    assert end(found) == pytest.approx(end(exact), rel=1e-4)


def test_durations_over_many_decades() -> None:
    rng = np.random.default_rng(2)
    dag = build_dag(one_f_one_b_order(8, 16))
    high = rng.lognormal(0.0, 3.0, len(dag.actions))
    bounds = DurationBounds(np.where(dag.freezable, high * rng.random(len(high)), high), high)
    lp = build_lp(dag, bounds, 0.8)
    found, exact = solve_by_interior_point(lp, 60.0).ratios, solve_by_simplex(lp, 60.0)
    assert batch(dag, bounds, lp, found) == pytest.approx(batch(dag, bounds, lp, exact), rel=1e-4)


def test_too_little_time_is_an_error_with_its_status() -> None:
    dag = scheduled("1F1B", 8, 16)
    lp = build_lp(dag, noisy_bounds(dag, 0), 0.5)
    with pytest.raises(LpError, match=r"within 0.1% of the optimum; it has A=256") as error:
        solve_by_interior_point(lp, 1e-9)
    assert error.value.status == "Time limit reached"


def test_many_actions_are_solved_from_the_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    dag = scheduled("1F1B", 4, 8)
    bounds = noisy_bounds(dag, 0)
    asked = []

    def noted(lp: FreezeLp, time_limit_s: float) -> CertifiedRatios:
        asked.append(lp.n_actions)
        return solve_by_interior_point(lp, time_limit_s)

    monkeypatch.setattr(timelyfreeze.planning.lp, "solve_by_interior_point", noted)
    small = solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.8)
    assert asked == []
    monkeypatch.setattr(timelyfreeze.planning.lp, "MAX_ACTIONS_BY_SIMPLEX", len(dag.actions) - 1)
    large = solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.8)
    assert asked == [len(dag.actions)]
    assert large.batch_ms == pytest.approx(small.batch_ms, rel=1e-4)


def test_where_it_fails_simplex_gets_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(lp: FreezeLp, time_limit_s: float) -> np.ndarray:
        raise LpError("lost its way", status="Numerical difficulties")

    dag = scheduled("1F1B", 4, 8)
    bounds = noisy_bounds(dag, 0)
    exact = solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.8)
    monkeypatch.setattr(timelyfreeze.planning.lp, "MAX_ACTIONS_BY_SIMPLEX", 0)
    monkeypatch.setattr(timelyfreeze.planning.lp, "solve_by_interior_point", fail)
    again = solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.8)
    assert again.ratios.tolist() == exact.ratios.tolist()
    assert "lost its way; the simplex method has 60 s left" in caplog.text
    with pytest.raises(LpError, match="lost its way"):
        solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.8, time_limit_s=1e-9)


@pytest.mark.parametrize("broken", [Exception, BaseException, None])
def test_whatever_breaks_in_the_arithmetic_leaves_it_to_simplex(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: type[BaseException] | None,
) -> None:
    def fail(*_: object) -> SimpleNamespace:
        if broken is not None:
            raise broken("Singular matrix")  # as clarabel does, and a panic of Rust
        return SimpleNamespace(solve=lambda: Answer(math.nan))

    class Answer:
        status, iterations = "NumericalError", 3

        def __init__(self, number: float) -> None:
            self.x, self.z = number, [number] * 10**4

    dag = scheduled("1F1B", 4, 16)
    bounds = noisy_bounds(dag, 0)
    exact = solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.8)
    monkeypatch.setattr(timelyfreeze.planning.lp, "MAX_ACTIONS_BY_SIMPLEX", 0)
    monkeypatch.setattr(clarabel, "DefaultSolver", fail)
    again = solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.8)
    assert again.ratios.tolist() == exact.ratios.tolist()
    assert "ended with status 'Num" in caplog.text


def test_an_answer_that_the_bound_does_not_confirm_is_not_handed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing frozen, called an optimum: the lower bound sees through it."""

    class Liar:
        status, iterations = "Solved", 3

        def __init__(self, _p: object, cost: np.ndarray, g: Any, h: np.ndarray, *_: Any) -> None:
            self.x, self.z = np.zeros(len(cost)), np.ones(len(h))

        def solve(self) -> "Liar":
            return self

    dag = scheduled("1F1B", 4, 16)
    lp = build_lp(dag, noisy_bounds(dag, 0), 0.8)
    monkeypatch.setattr(clarabel, "DefaultSolver", Liar)
    with pytest.raises(LpError, match=r"'Solved', not within 0.1% of the optimum"):
        solve_by_interior_point(lp, 60.0)


@pytest.mark.parametrize("missing", ["clarabel", "scipy"])
def test_without_clarabel_simplex_solves_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    dag = scheduled("1F1B", 4, 8)
    bounds = noisy_bounds(dag, 0)
    exact = solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.8)
    monkeypatch.setattr(timelyfreeze.planning.lp, "MAX_ACTIONS_BY_SIMPLEX", 0)
    monkeypatch.setitem(sys.modules, missing, None)
    timelyfreeze.planning.lp._say_once.cache_clear()
    with caplog.at_level(logging.INFO, "timelyfreeze.planning.lp"):
        for _ in range(2):
            again = solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.8)
            assert again.ratios.tolist() == exact.ratios.tolist()
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert "pip install clarabel" in record.getMessage()


@given(seeds, st.sampled_from(CAPS))
def test_stages_frozen_whole(seed: int, cap: float) -> None:
    """With either solver inside: ratios of 0 and 1, the cap kept, none of them in vain."""
    dag = build_dag(one_f_one_b_order(3, 5))
    bounds = noisy_bounds(dag, seed, noise=0.2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timelyfreeze.planning.lp, "MAX_ACTIONS_BY_SIMPLEX", 0)
        plan = solve_freeze_ratios(dag, bounds, max_freeze_ratio=cap, whole_stages=(0,))
        free = solve_freeze_ratios(dag, bounds, max_freeze_ratio=cap)
    first = (dag.stages == 0) & dag.freezable
    assert set(plan.ratios[first].tolist()) <= {0.0, 1.0}
    assert plan.ratios[first].sum() <= cap * first.sum() + 1e-9
    assert plan.batch_ms >= free.batch_ms * (1.0 - 1e-4)
