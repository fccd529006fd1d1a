import doctest
import itertools

import highspy
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import timelyfreeze.planning.lp
from tests.timelyfreeze.helpers.pipelines import BY_HAND, hand_order, random_bounds, random_order
from timelyfreeze.planning.lp import LpError, build_lp, solve_freeze_ratios
from timelyfreeze.planning.plan import FreezePlan, plan_from_ratios
from timelyfreeze.schedule.dag import PipelineDag, build_dag, makespan, start_times
from timelyfreeze.schedule.order import gpipe_order, one_f_one_b_order, parse_order
from timelyfreeze.timing.bounds import DurationBounds, uniform_bounds

seeds = st.integers(0, 10**6)
caps = st.sampled_from([0.0, 0.1, 0.35, 0.5, 0.8, 1.0])


def frozen_actions(plan: FreezePlan) -> dict[str, float]:
    """What the plan freezes; ratios rounded far below any difference that matters."""
    pairs = zip(plan.actions, plan.ratios.tolist(), strict=True)
    return {str(action): round(ratio, 9) for action, ratio in pairs if ratio > 0.0}


def test_the_solver_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """It prints a banner, and what it does, where nobody has told it to be quiet."""
    dag = build_dag(one_f_one_b_order(2, 3))
    solve_freeze_ratios(dag, random_bounds(dag, 0), max_freeze_ratio=0.5)
    assert capfd.readouterr() == ("", "")


def test_docstring_example() -> None:
    assert doctest.testmod(timelyfreeze.planning.lp).failed == 0
    assert doctest.testmod(timelyfreeze.planning.lp).attempted > 0


@pytest.mark.parametrize(
    ("cap", "batch_ms", "frozen"),
    [
        (0.0, 9.0, {}),
        # 1B0 is on every longest path, and so is 0B1 once all else is done; one each is allowed.
        (0.5, 7.0, {"1B0": 1.0, "0B1": 1.0}),
        # The path 0F0 1F0 1F1 1B0 0B0 0B1 has to shrink throughout; 1B1 ends with 0B0 and so must
        # shrink too for 0B1 to start.
        (1.0, 6.0, {"0B0": 1.0, "0B1": 1.0, "1B0": 1.0, "1B1": 1.0}),
    ],
)
def test_two_stages_two_microbatches(cap: float, batch_ms: float, frozen: dict) -> None:
    dag = build_dag(hand_order("two_by_two"))
    bounds = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
    plan = solve_freeze_ratios(dag, bounds, max_freeze_ratio=cap)
    assert (plan.unfrozen_batch_ms, plan.batch_ms, plan.frozen_batch_ms) == (9.0, batch_ms, 6.0)
    assert frozen_actions(plan) == frozen


def test_one_rank_spends_its_budget_where_it_saves_most() -> None:
    dag = build_dag(parse_order(["0F0 0F1 0B0 0B1"]))
    low, high = np.array([1.0, 1.0, 1.0, 1.0]), np.array([1.0, 1.0, 2.0, 4.0])
    bounds = DurationBounds(low, high)
    # 0B0 saves 1 ms, 0B1 saves 3 ms; at 0.75 the budget is 1.5 backwards.
    plan = solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.75)
    assert frozen_actions(plan) == {"0B1": 1.0, "0B0": 0.5}
    assert plan.batch_ms == pytest.approx(8.0 - 3.0 - 0.5, rel=1e-12)


def test_split_backward_freezes_no_more_than_the_slowest_rank_needs() -> None:
    # Unfrozen: 1W0 runs 3..5, 0W0 runs 4..6. Frozen whole, 0W0 ends at 4; for 1W0 to end by then,
    # half of it is enough, though the cap allows all.
    dag = build_dag(parse_order(["0F0 0I0 0W0", "1F0 1I0 1W0"]))
    bounds = uniform_bounds(dag, forward_ms=1.0, input_ms=1.0, weight_ms=(0.0, 2.0))
    plan = solve_freeze_ratios(dag, bounds, max_freeze_ratio=1.0)
    assert plan.batch_ms == 4.0
    assert frozen_actions(plan) == {"0W0": 1.0, "1W0": 0.5}
    half = solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.5)
    assert half.batch_ms == 5.0
    assert frozen_actions(half) == {"0W0": 0.5}


def test_each_stage_may_have_its_own_cap() -> None:
    dag = build_dag(parse_order(["0F0 0I0 0W0", "1F0 1I0 1W0"]))
    bounds = uniform_bounds(dag, forward_ms=1.0, input_ms=1.0, weight_ms=(0.0, 2.0))
    plan = solve_freeze_ratios(dag, bounds, max_freeze_ratio=[1.0, 0.25])
    assert plan.batch_ms == 4.5
    assert frozen_actions(plan) == {"0W0": 0.75, "1W0": 0.25}


def test_pinned_actions_count_in_the_budget_but_stay_live() -> None:
    # Of two backwards one cannot be sped up; the cap 0.5 on their mean still lets the other freeze.
    dag = build_dag(parse_order(["0F0 0F1 0B0 0B1"]))
    bounds = DurationBounds(np.array([1.0, 1.0, 3.0, 1.0]), np.array([1.0, 1.0, 3.0, 3.0]))
    plan = solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.5)
    assert frozen_actions(plan) == {"0B1": 1.0}
    assert plan.stage_mean_ratios() == {0: 0.5}


def test_nothing_can_be_sped_up() -> None:
    dag = build_dag(hand_order("v_shape"))
    bounds = uniform_bounds(
        dag, forward_ms=1.0, backward_ms=(2.0, 2.0), input_ms=1.0, weight_ms=(1.0, 1.0)
    )
    plan = solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.8)
    assert frozen_actions(plan) == {}
    assert plan.batch_ms == plan.unfrozen_batch_ms


# --- against other ways of solving ----------------------------------------------------------------


def solve_dense(dag: PipelineDag, bounds: DurationBounds, cap: float) -> tuple[float, float]:
    """Least P_d, then least sum of ratios at it, from Eq. 6 as printed, by interior point.

    Columns P_s, P_1..P_A, P_d, w_1..w_A; a source and a destination node; one dense row each.
    """
    n = len(dag.actions)
    source, destination = 0, n + 1
    span = bounds.max_ms - bounds.min_ms
    delta = np.divide(1.0, span, out=np.zeros(n), where=span > 0)

    def minimise(cost: np.ndarray, limit: float) -> float:
        solver = highspy.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("solver", "ipm")
        for option in ("primal_feasibility", "dual_feasibility", "ipm_optimality"):
            solver.setOptionValue(f"{option}_tolerance", 1e-10)
        lower = np.concatenate([np.zeros(n + 2), bounds.min_ms])
        upper = np.concatenate([[0.0], np.full(n, highspy.kHighsInf), [limit], bounds.max_ms])
        for column in range(2 * n + 2):
            solver.addVar(lower[column], upper[column])
            solver.changeColCost(column, cost[column])
        everyone = np.arange(2 * n + 2, dtype=np.int32)

        def add(row: np.ndarray, low: float, high: float) -> None:
            solver.addRow(low, high, len(row), everyone, row)

        arcs = [(i + 1, j + 1) for i, j in dag.edges.tolist()]
        arcs += [(source, i + 1) for i in range(n)] + [(i + 1, destination) for i in range(n)]
        for i, j in arcs:
            row = np.zeros(2 * n + 2)
            row[j], row[i] = 1.0, -1.0
            if i != source:
                row[n + 1 + i] = -1.0
            add(row, 0.0, highspy.kHighsInf)
        for stage in range(dag.n_stages):
            members = (dag.stages == stage) & dag.freezable
            row = np.zeros(2 * n + 2)
            row[n + 2 :] = -delta * members
            constant = float((delta * members * bounds.max_ms).sum())
            add(row, -highspy.kHighsInf, cap * members.sum() - constant)
        solver.run()
        assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
        return float(solver.getInfo().objective_function_value)

    cost = np.zeros(2 * n + 2)
    cost[destination] = 1.0
    best = minimise(cost, highspy.kHighsInf)
    cost = np.concatenate([np.zeros(n + 2), -delta])
    least = minimise(cost, best * (1.0 + 1e-10)) + float((delta * bounds.max_ms).sum())
    return best, least


@given(seeds, seeds, caps)
def test_agrees_with_the_program_as_printed(seed: int, duration_seed: int, cap: float) -> None:
    dag = build_dag(random_order(seed))
    bounds = random_bounds(dag, duration_seed)
    plan = solve_freeze_ratios(dag, bounds, max_freeze_ratio=cap)
    best_ms, min_freezing = solve_dense(dag, bounds, cap)
    assert plan.batch_ms == pytest.approx(best_ms, rel=1e-8)
    assert plan.ratios.sum() == pytest.approx(min_freezing, abs=1e-6)


@pytest.mark.parametrize("cap", [0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize(
    "rows", [["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"], ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]]
)
def test_no_grid_point_is_better(rows: list[str], cap: float) -> None:
    dag = build_dag(parse_order(rows))
    bounds = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
    plan = solve_freeze_ratios(dag, bounds, max_freeze_ratio=cap)
    free = np.flatnonzero(dag.freezable)
    found = []
    for point in itertools.product((0.0, 0.25, 0.5, 0.75, 1.0), repeat=len(free)):
        ratios = np.zeros(len(dag.actions))
        ratios[free] = point
        means = [ratios[dag.freezable & (dag.stages == s)].mean() for s in range(dag.n_stages)]
        if max(means) <= cap:
            found.append((makespan(dag, bounds.max_ms - ratios), sum(point)))
    best_ms, min_freezing = min(found)
    assert plan.batch_ms <= best_ms + 1e-9
    # With these durations an optimum lies on the grid.
    assert (plan.batch_ms, plan.ratios.sum()) == pytest.approx((best_ms, min_freezing), abs=1e-8)


# --- properties -----------------------------------------------------------------------------------


@given(seeds, seeds)
def test_batch_time_falls_from_unfrozen_to_frozen(seed: int, duration_seed: int) -> None:
    dag = build_dag(random_order(seed))
    bounds = random_bounds(dag, duration_seed)
    plans = [solve_freeze_ratios(dag, bounds, max_freeze_ratio=cap) for cap in np.linspace(0, 1, 6)]
    for looser, tighter in itertools.pairwise(reversed(plans)):
        assert looser.batch_ms <= tighter.batch_ms * (1.0 + 1e-9)
    assert plans[0].batch_ms == makespan(dag, bounds.max_ms)
    assert plans[-1].batch_ms == pytest.approx(makespan(dag, bounds.min_ms), rel=1e-9)


@given(seeds, seeds, caps)
def test_plan_keeps_every_constraint(seed: int, duration_seed: int, cap: float) -> None:
    dag = build_dag(random_order(seed))
    bounds = random_bounds(dag, duration_seed)
    plan = solve_freeze_ratios(dag, bounds, max_freeze_ratio=cap)
    assert ((plan.ratios >= 0.0) & (plan.ratios <= 1.0)).all()
    assert (plan.ratios[bounds.max_ms == bounds.min_ms] == 0.0).all()
    assert all(mean <= cap + 1e-8 for mean in plan.stage_mean_ratios().values())
    expected = bounds.max_ms - plan.ratios * (bounds.max_ms - bounds.min_ms)
    assert plan.durations_ms == pytest.approx(expected, rel=1e-12)
    assert plan.start_ms.tolist() == start_times(dag, plan.durations_ms).tolist()
    assert plan.batch_ms == makespan(dag, plan.durations_ms)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e3, 1e6])
@pytest.mark.parametrize("name", BY_HAND)
def test_units_do_not_matter(name: str, scale: float) -> None:
    dag = build_dag(hand_order(name))
    bounds = random_bounds(dag, 3)
    scaled = DurationBounds(bounds.min_ms * scale, bounds.max_ms * scale)
    plan = solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.6)
    again = solve_freeze_ratios(dag, scaled, max_freeze_ratio=0.6)
    assert again.ratios == pytest.approx(plan.ratios, abs=1e-7)
    assert again.batch_ms == pytest.approx(plan.batch_ms * scale, rel=1e-8)


@pytest.mark.parametrize("seed", [2, 9, 18, 35, 40])
def test_durations_over_many_decades(seed: int) -> None:
    # Here HiGHS 1.15 calls its own optimum infeasible, or unknown, when P_d gets no room. The most
    # it gets is a relative 1e-7.
    rng = np.random.default_rng(seed)
    dag = build_dag(one_f_one_b_order(8, 16))
    high = rng.lognormal(0.0, 3.0, len(dag.actions))
    bounds = DurationBounds(np.where(dag.freezable, high * rng.random(len(high)), high), high)
    plans = [solve_freeze_ratios(dag, bounds, max_freeze_ratio=r) for r in (0.3, 0.8, 1.0)]
    for tighter, looser in itertools.pairwise(plans):
        assert looser.batch_ms <= tighter.batch_ms * (1.0 + 1e-7)
    assert plans[2].batch_ms == pytest.approx(makespan(dag, bounds.min_ms), rel=1e-7)


@pytest.mark.parametrize("generate", [gpipe_order, one_f_one_b_order])
def test_expected_gain_of_the_design(generate) -> None:
    # F = dX = dW, 4 stages, 8 microbatches. The first stage has no dX to send on, so that nothing
    # of its backward is left when it is frozen whole: 33 slots become 21.
    dag = build_dag(generate(4, 8))
    high = np.where(dag.freezable, 2.0, 1.0)
    low = np.where(dag.freezable & (dag.stages == 0), 0.0, 1.0)
    plan = solve_freeze_ratios(dag, DurationBounds(low, high), max_freeze_ratio=0.8)
    assert (plan.unfrozen_batch_ms, plan.frozen_batch_ms) == (33.0, 21.0)
    assert plan.upper_bound_gain == pytest.approx(0.57, abs=0.005)
    assert plan.gain == pytest.approx(0.46, abs=0.01)


# --- the matrix -----------------------------------------------------------------------------------


def test_matrix_by_hand() -> None:
    # 0F0 -> 0B0 on one rank. Columns: P of 0F0, P of 0B0, P_d, ratio of 0B0. Unit of time: 4 ms.
    dag = build_dag(parse_order(["0F0 0B0"]))
    lp = build_lp(dag, uniform_bounds(dag, forward_ms=2.0, backward_ms=(1.0, 4.0)), 0.8)
    dense = np.zeros((len(lp.row_lower), len(lp.column_lower)))
    for row, (begin, end) in enumerate(itertools.pairwise(lp.row_start)):
        dense[row, lp.columns[begin:end]] = lp.values[begin:end]
    assert dense.tolist() == [
        [-1.0, 1.0, 0.0, 0.0],  # P(0B0) - P(0F0) >= 2 / 4
        [0.0, -1.0, 1.0, 0.75],  # P_d - P(0B0) + 3/4 r >= 4 / 4
        [0.0, 0.0, 0.0, 1.0],  # r <= 0.8 of 1 freezable action
    ]
    assert lp.row_lower.tolist() == [0.5, 1.0, -np.inf]
    assert lp.row_upper.tolist() == [np.inf, np.inf, 0.8]
    assert lp.column_lower.tolist() == [0.0] * 4
    assert lp.column_upper.tolist() == [np.inf, np.inf, np.inf, 1.0]
    assert lp.scale_ms == 4.0


def test_matrix_is_sparse_and_of_the_stated_shape() -> None:
    dag = build_dag(one_f_one_b_order(16, 64))
    lp = build_lp(dag, uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0)), 0.8)
    n_actions, n_edges, n_freezable = 2 * 16 * 64, len(dag.edges), 16 * 64
    n_last = n_actions - len(set(dag.edges[:, 0].tolist()))
    assert (lp.n_actions, lp.n_edges, lp.n_stages) == (n_actions, n_edges, 16)
    assert len(lp.column_lower) == len(lp.column_upper) == n_actions + 1 + n_freezable
    # F -> B of a stage follows from the order on its rank, unless one comes right after the other.
    n_implied = 16 * 64 - 64
    assert lp.n_precedence == n_edges - n_implied + n_last
    assert len(lp.row_lower) == len(lp.row_upper) == lp.n_precedence + 16
    assert len(lp.row_start) == len(lp.row_lower) + 1
    assert lp.row_start[-1] == len(lp.columns) == len(lp.values)
    assert len(lp.values) <= 3 * (n_edges + n_last) + n_freezable
    assert (lp.values != 0.0).all()
    assert np.isin(lp.freezable, np.flatnonzero(dag.freezable)).all()


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cap", "message"),
    [
        (1.2, r"max_freeze_ratio is 1.2; it must lie in \[0, 1\]"),
        (-0.1, "max_freeze_ratio is -0.1"),
        (float("nan"), "max_freeze_ratio is nan"),
        ([0.5, 1.5], "max_freeze_ratio is 1.5"),
        ([0.5] * 3, "max_freeze_ratio has 3 values; .*each of the 2 stages"),
        ([0.5], "max_freeze_ratio has 1 values"),
    ],
)
def test_refuses_a_cap(cap: float, message: str) -> None:
    dag = build_dag(hand_order("two_by_two"))
    bounds = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
    with pytest.raises(ValueError, match=message):
        solve_freeze_ratios(dag, bounds, max_freeze_ratio=cap)


def test_refuses_bounds_that_do_not_fit() -> None:
    dag = build_dag(hand_order("two_by_two"))
    other = build_dag(hand_order("interleaved"))
    bounds = uniform_bounds(other, forward_ms=1.0, backward_ms=(1.0, 2.0))
    with pytest.raises(ValueError, match=r"min_ms has shape \(16,\)"):
        solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.5)


def test_refuses_a_batch_that_takes_no_time() -> None:
    dag = build_dag(hand_order("two_by_two"))
    bounds = uniform_bounds(dag, forward_ms=0.0, backward_ms=(0.0, 0.0))
    with pytest.raises(ValueError, match=r"every action lasts 0 ms.*monitor"):
        solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.5)


def test_stopping_early_is_an_error_with_its_status() -> None:
    dag = build_dag(one_f_one_b_order(8, 16))
    bounds = random_bounds(dag, 0)
    with pytest.raises(LpError, match=r"A=256 actions, E=\d+ edges, S=8 stages") as error:
        solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.5, time_limit_s=1e-9)
    assert error.value.status == "Time limit reached"
    assert error.value.status in str(error.value)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_refuses_a_time_limit(limit: float) -> None:
    dag = build_dag(hand_order("two_by_two"))
    bounds = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
    with pytest.raises(ValueError, match=f"time_limit_s is {limit}; it must be positive"):
        solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.5, time_limit_s=limit)


def test_solver_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    dag = build_dag(hand_order("two_by_two"))
    bounds = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
    solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.5)
    assert capfd.readouterr() == ("", "")


@given(seed=st.integers(0, 2**16), cap=st.floats(0.0, 1.0))
def test_whole_stages_are_frozen_whole_within_their_cap(seed: int, cap: float) -> None:
    """No fraction where a stage is frozen whole, the cap kept, never better than with fractions,
    and with enough room for all of them as good."""
    rng = np.random.default_rng(seed)
    dag = build_dag(one_f_one_b_order(3, 5))
    longest = rng.uniform(1.0, 3.0, len(dag.actions))
    shortest = np.where(dag.freezable, longest * rng.uniform(0.0, 0.9, len(longest)), longest)
    bounds = DurationBounds(min_ms=shortest, max_ms=longest)
    free = solve_freeze_ratios(dag, bounds, max_freeze_ratio=cap)
    whole = solve_freeze_ratios(dag, bounds, max_freeze_ratio=cap, whole_stages=(0,))
    of_stage = whole.ratios[(dag.stages == 0) & dag.freezable]
    assert set(of_stage.tolist()) <= {0.0, 1.0}
    assert of_stage.sum() <= cap * len(of_stage) + 1e-6
    assert whole.batch_ms >= free.batch_ms * (1 - 1e-9)
    roomy = [1.0, cap, cap]
    assert solve_freeze_ratios(
        dag, bounds, max_freeze_ratio=roomy, whole_stages=(0,)
    ).batch_ms == pytest.approx(
        solve_freeze_ratios(dag, bounds, max_freeze_ratio=roomy).batch_ms, rel=1e-9
    )


def test_no_action_of_a_whole_stage_is_frozen_in_vain() -> None:
    """Taking any one away makes the batch longer."""
    dag = build_dag(one_f_one_b_order(3, 5))
    rng = np.random.default_rng(3)
    longest = rng.uniform(1.0, 3.0, len(dag.actions))
    shortest = np.where(dag.freezable, 0.3 * longest, longest)
    bounds = DurationBounds(min_ms=shortest, max_ms=longest)
    fractions = solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.7).ratios
    plan = solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.7, whole_stages=(0,))
    rounded = (dag.stages == 0) & (plan.ratios == 1.0) & (fractions < 1.0) & (fractions > 0.0)
    for i in np.flatnonzero(rounded):
        without = np.where(np.arange(len(plan.ratios)) == i, 0.0, plan.ratios)
        assert plan_from_ratios(dag, bounds, without).batch_ms > plan.batch_ms
