"""Messages that take time between ranks: in start times, play-throughs, plans and files."""

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import timelyfreeze.planning.lp
import timelyfreeze.planning.simplex
from tests.timelyfreeze.helpers.pipelines import critical_path, random_bounds, random_order
from tests.timelyfreeze.helpers.programs import noisy_bounds, scheduled
from timelyfreeze.planning.lp import solve_freeze_ratios
from timelyfreeze.planning.plan import plan_from_ratios
from timelyfreeze.schedule.dag import (
    PipelineDag,
    build_dag,
    edge_delays,
    makespan,
    start_times,
)
from timelyfreeze.schedule.order import parse_order
from timelyfreeze.settings.phases import Phase
from timelyfreeze.timing.batches import RankBatches, batch_times
from timelyfreeze.timing.bounds import (
    DurationBounds,
    bounds_from_json,
    bounds_to_json,
    uniform_bounds,
    validate_bounds,
)
from timelyfreeze.timing.processors import message_time, simulate_batch

SEEDS = st.integers(0, 10**6)
LINE = parse_order(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])


def random_links(dag: PipelineDag, seed: int) -> dict[tuple[int, int], float]:
    rng = np.random.default_rng(seed)
    n_ranks = int(dag.ranks.max()) + 1
    return {
        (a, b): float(rng.choice([0.0, 0.25, rng.uniform(0.0, 3.0)]))
        for a in range(n_ranks)
        for b in range(n_ranks)
        if a != b
    }


def by_events(dag: PipelineDag, durations: np.ndarray, delays: np.ndarray) -> float:
    """What a batch takes, played event by event."""
    return max(ends_by_events(dag, durations, delays).values(), default=0.0)


def ends_by_events(dag: PipelineDag, durations: np.ndarray, delays: np.ndarray) -> dict[int, float]:
    """When actions end: whatever has ended sends, whatever has all that it needs begins."""
    missing = dict.fromkeys(range(len(dag.actions)), 0)
    sends: dict[int, list[tuple[int, float]]] = {i: [] for i in missing}
    for (i, j), delay in zip(dag.edges.tolist(), delays.tolist(), strict=True):
        missing[j] += 1
        sends[i].append((j, delay))
    events = [(durations[i], "ends", i) for i in missing if missing[i] == 0]
    heapq.heapify(events)
    ends: dict[int, float] = {}
    while events:
        now, what, i = heapq.heappop(events)
        if what == "ends":
            ends[i] = now
            for j, delay in sends[i]:
                heapq.heappush(events, (now + delay, "arrives", j))
        else:
            missing[i] -= 1
            if missing[i] == 0:
                heapq.heappush(events, (now + durations[i], "ends", i))
    return ends


def test_by_hand() -> None:
    dag = build_dag(LINE)
    delays = edge_delays(dag, {(0, 1): 0.5, (1, 0): 0.25})
    durations = [{"F": 1.0, "B": 2.0}[str(a)[1]] for a in dag.actions]
    starts = dict(zip(map(str, dag.actions), start_times(dag, durations, delays), strict=True))
    # Forwards leave at 1 and 2 and arrive half a unit later; gradients take a quarter.
    assert starts == {
        "0F0": 0.0, "0F1": 1.0, "0B0": 4.75, "0B1": 7.75,
        "1F0": 1.5, "1B0": 2.5, "1F1": 4.5, "1B1": 5.5,
    }  # fmt: skip
    assert makespan(dag, durations, delays) == 9.75
    path = [str(a) for a in critical_path(dag, durations, delays)]
    assert path == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]


def test_no_message_passes_within_a_rank() -> None:
    """Both stages of a V-shaped pipeline's last rank lie together."""
    dag = build_dag(parse_order(["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"]))
    delays = edge_delays(dag, {(0, 1): 1.0, (1, 0): 1.0})
    waits = {
        (str(dag.actions[i]), str(dag.actions[j]))
        for (i, j), delay in zip(dag.edges.tolist(), delays, strict=True)
        if delay
    }
    assert waits == {("0F0", "1F0"), ("2F0", "3F0"), ("3B0", "2B0"), ("1B0", "0B0")}


@given(seed=SEEDS, fraction=st.sampled_from([None, 0.999999999]))
def test_a_batch_lasts_as_long_as_its_events(seed: int, fraction: float | None) -> None:
    """Shared processors that are almost enough take the other way through the code."""
    dag = build_dag(random_order(seed))
    rng = np.random.default_rng(seed)
    durations = rng.choice([0.0, 0.5, 1.0, float(rng.uniform(0.1, 5.0))], len(dag.actions))
    delays = edge_delays(dag, random_links(dag, seed))
    n_processors = None if fraction is None else fraction * (int(dag.ranks.max()) + 1)
    _, batch_ms = simulate_batch(dag, durations, n_processors, delays)
    assert batch_ms == pytest.approx(by_events(dag, durations, delays), rel=1e-6)


@given(seed=SEEDS, n_processors=st.floats(0.5, 3.0))
def test_messages_on_their_way_take_no_processor(seed: int, n_processors: float) -> None:
    dag = build_dag(random_order(seed))
    durations = np.random.default_rng(seed).uniform(0.1, 2.0, len(dag.actions))
    delays = edge_delays(dag, random_links(dag, seed))
    start, batch_ms = simulate_batch(dag, durations, n_processors, delays)
    without_ms = simulate_batch(dag, durations, n_processors)[1]
    assert batch_ms >= makespan(dag, durations, delays) - 1e-9
    assert batch_ms <= without_ms + delays.sum() + 1e-9
    for (i, j), delay in zip(dag.edges.tolist(), delays, strict=True):
        assert start[j] >= start[i] + durations[i] + delay - 1e-9


@given(seed=SEEDS)
def test_ranks_without_a_common_clock_know_when_messages_let_them_begin(seed: int) -> None:
    dag = build_dag(random_order(seed))
    durations = np.random.default_rng(seed).uniform(0.5, 5.0, len(dag.actions))
    delays = edge_delays(dag, random_links(dag, seed))
    ends = ends_by_events(dag, durations, delays)
    ranks = []
    for rank in range(int(dag.ranks.max()) + 1):
        mine = np.flatnonzero(dag.ranks == rank).tolist()
        span_ms = max(ends[i] for i in mine) - min(ends[i] - durations[i] for i in mine)
        own = {dag.actions[i]: float(durations[i]) for i in mine}
        ranks.append(RankBatches(((Phase.STABLE.value, span_ms),), own))
    found = batch_times(dag, ranks, delays)
    assert found == {Phase.STABLE: (pytest.approx(max(ends.values())),)}


def solve_by_hand(
    dag: PipelineDag, bounds: DurationBounds, cap: float, n_processors: float | None = None
) -> float:
    """Least batch time of Eq. 6 with messages, one dense row at a time.

    Columns: start of each action, end of the batch, ratio of each action.
    """
    linprog = pytest.importorskip("scipy.optimize").linprog
    n, rows, most = len(dag.actions), [], []
    span = bounds.max_ms - bounds.min_ms

    def at_most(right: float, **coefficients: dict[int, float]) -> None:
        row = np.zeros(2 * n + 1)
        for i, value in coefficients.get("start", {}).items():
            row[i] = value
        row[n] = coefficients.get("end", {}).get(0, 0.0)
        for i, value in coefficients.get("ratio", {}).items():
            row[n + 1 + i] = value
        rows.append(row)
        most.append(right)

    for i, j in dag.edges.tolist():
        crosses = dag.ranks[i] != dag.ranks[j]
        delay = bounds.p2p_latency_ms.get((int(dag.ranks[i]), int(dag.ranks[j])), 0.0)
        # start_i + max_i - ratio_i span_i + delay <= start_j
        at_most(
            -bounds.max_ms[i] - (delay if crosses else 0.0),
            start={i: 1.0, j: -1.0},
            ratio={i: -span[i]},
        )
    for i in range(n):
        at_most(-bounds.max_ms[i], start={i: 1.0}, end={0: -1.0}, ratio={i: -span[i]})
    for stage in range(dag.n_stages):
        of_stage = np.flatnonzero(dag.freezable & (dag.stages == stage)).tolist()
        at_most(cap * len(of_stage), ratio=dict.fromkeys(of_stage, 1.0))
    if n_processors is not None and n_processors < int(dag.ranks.max()) + 1:
        at_most(
            -float(bounds.max_ms.sum()),
            end={0: -n_processors},
            ratio={i: -float(span[i]) for i in range(n)},
        )
    upper = [None] * (n + 1) + [1.0 if s > 0.0 else 0.0 for s in span]
    cost = np.zeros(2 * n + 1)
    cost[n] = 1.0
    found = linprog(cost, A_ub=np.array(rows), b_ub=most, bounds=[(0.0, u) for u in upper])
    assert found.status == 0, found.message
    return float(found.fun)


def with_links(dag: PipelineDag, bounds: DurationBounds, seed: int) -> DurationBounds:
    return DurationBounds(bounds.min_ms, bounds.max_ms, p2p_latency_ms=random_links(dag, seed))


@pytest.mark.slow
@given(seed=SEEDS, cap=st.sampled_from([0.0, 0.3, 0.8, 1.0]))
def test_no_plan_is_faster_than_the_program_written_by_hand(seed: int, cap: float) -> None:
    dag = build_dag(random_order(seed))
    bounds = with_links(dag, random_bounds(dag, seed), seed + 1)
    plan = solve_freeze_ratios(dag, bounds, max_freeze_ratio=cap)
    assert plan.batch_ms == pytest.approx(solve_by_hand(dag, bounds, cap), rel=1e-6)


@pytest.mark.parametrize("cap", [0.3, 0.8])
@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_from_the_inside_it_is_the_same_plan(
    monkeypatch: pytest.MonkeyPatch, name: str, cap: float
) -> None:
    """Large programs go to another solver; here a small one is sent there."""
    monkeypatch.setattr(timelyfreeze.planning.lp, "MAX_ACTIONS_BY_SIMPLEX", 0)

    def refused(*_: object) -> None:
        raise AssertionError("the simplex method was asked")

    monkeypatch.setattr(timelyfreeze.planning.simplex, "solve_by_simplex", refused)
    dag = scheduled(name, 3, 6)
    bounds = with_links(dag, noisy_bounds(dag, 1), 2)
    plan = solve_freeze_ratios(dag, bounds, max_freeze_ratio=cap)
    min_ms = solve_by_hand(dag, bounds, cap)
    # What it promises: within 0.1%.
    assert min_ms * (1 - 1e-6) <= plan.batch_ms <= min_ms * 1.001
    assert plan.batch_ms == pytest.approx(
        by_events(dag, plan.durations_ms, bounds.delays_ms(dag)), rel=1e-9
    )


@given(seed=SEEDS, n_processors=st.floats(0.6, 2.5))
def test_ranks_that_fraction_cores_wait_for_messages_and_for_work(
    seed: int, n_processors: float
) -> None:
    """The program knows the longest path and the sum of all work; a batch played takes longer."""
    dag = build_dag(random_order(seed))
    bounds = with_links(dag, random_bounds(dag, seed), seed + 1)
    plan = solve_freeze_ratios(dag, bounds, max_freeze_ratio=0.6, n_processors=n_processors)
    min_ms = solve_by_hand(dag, bounds, 0.6, n_processors)
    assert plan.batch_ms >= min_ms * (1 - 1e-6)
    delays = bounds.delays_ms(dag)
    ends = [by_events(dag, plan.durations_ms, delays)]
    if n_processors < int(dag.ranks.max()) + 1:
        ends.append(plan.durations_ms.sum() / n_processors)
    assert max(ends) == pytest.approx(min_ms, rel=1e-6)
    played_ms = simulate_batch(dag, plan.durations_ms, n_processors, delays)[1]
    assert plan.batch_ms == pytest.approx(played_ms)


def test_two_ranks_on_one_core_by_hand() -> None:
    """While a message is on its way its receiver leaves the core to the other rank."""
    dag = build_dag(parse_order(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]))
    durations = [{"F": 1.0, "B": 2.0}[str(a)[1]] for a in dag.actions]
    delays = edge_delays(dag, {(0, 1): 0.5, (1, 0): 4.0})
    starts, batch_ms = simulate_batch(dag, durations, 1.0, delays)
    by_name = dict(zip(map(str, dag.actions), starts.tolist(), strict=True))
    # 0F0 alone until 1; 1F0 arrives at 1.5, and shares the core with 0F1 until both have had their
    # millisecond: 0F1 ends at 2.5, 1F0 at 3. Then rank 1 is alone: 1B0 until 5, 1F1 until 6, 1B1
    # until 8. Gradients arrive at 9 and at 12.
    assert by_name == {
        "0F0": 0.0, "0F1": 1.0, "0B0": 9.0, "0B1": 12.0,
        "1F0": 1.5, "1B0": 3.0, "1F1": 5.0, "1B1": 6.0,
    }  # fmt: skip
    assert batch_ms == 14.0


@pytest.mark.parametrize("cap", [0.25, 0.5, 1.0])
def test_no_grid_point_is_better_with_messages(cap: float) -> None:
    dag = build_dag(LINE)
    plain = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
    links = {(0, 1): 0.5, (1, 0): 1.25}
    bounds = DurationBounds(plain.min_ms, plain.max_ms, p2p_latency_ms=links)
    plan = solve_freeze_ratios(dag, bounds, max_freeze_ratio=cap)
    free, found = np.flatnonzero(dag.freezable), []
    for point in itertools.product((0.0, 0.25, 0.5, 0.75, 1.0), repeat=len(free)):
        ratios = np.zeros(len(dag.actions))
        ratios[free] = point
        means = [ratios[dag.freezable & (dag.stages == s)].mean() for s in range(dag.n_stages)]
        if max(means) <= cap:
            found.append(by_events(dag, bounds.max_ms - ratios, bounds.delays_ms(dag)))
    # With these times an optimum lies on the grid.
    assert plan.batch_ms == pytest.approx(min(found), abs=1e-9)


@given(seed=SEEDS, cap=st.sampled_from([0.0, 0.3, 0.8, 1.0]))
def test_a_plan_takes_messages_into_account(seed: int, cap: float) -> None:
    dag = build_dag(random_order(seed))
    plain = random_bounds(dag, seed)
    bounds = DurationBounds(plain.min_ms, plain.max_ms, p2p_latency_ms=random_links(dag, seed))
    plan = solve_freeze_ratios(dag, bounds, max_freeze_ratio=cap)
    delays = bounds.delays_ms(dag)
    assert plan.batch_ms == pytest.approx(by_events(dag, plan.durations_ms, delays))
    assert plan.unfrozen_batch_ms == pytest.approx(by_events(dag, bounds.max_ms, delays))
    # Where everything may be frozen, nothing is faster; without messages, plans may differ, and
    # then the one that knows of them is at least as fast.
    if cap == 1.0:
        assert plan.batch_ms == pytest.approx(by_events(dag, bounds.min_ms, delays))
    blind = solve_freeze_ratios(dag, plain, max_freeze_ratio=cap)
    assert plan.batch_ms <= plan_from_ratios(dag, bounds, blind.ratios).batch_ms * (1 + 1e-7)


def test_slow_links_move_the_budget_to_where_it_helps() -> None:
    """With the messages as they are, only what the first stage does at the end is waited for."""
    dag = build_dag(parse_order(["0F0 0B0", "1F0 1B0"]))
    plain = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
    slow = DurationBounds(plain.min_ms, plain.max_ms, p2p_latency_ms={(0, 1): 7.0, (1, 0): 7.0})
    plan = solve_freeze_ratios(dag, slow, max_freeze_ratio=0.5)
    assert plan.batch_ms == 1 + 7 + 1 + 1.5 + 7 + 1.5
    assert plan.unfrozen_batch_ms == 20.0


def test_a_overhead_is_what_transfers_leave_unexplained() -> None:
    dag = build_dag(LINE)
    durations = np.ones(len(dag.actions))
    delays = edge_delays(dag, {(0, 1): 0.5, (1, 0): 0.5})
    measured_ms = makespan(dag, durations, delays)
    assert message_time(dag, durations, measured_ms) > 0.1
    assert message_time(dag, durations, measured_ms, None, delays) == 0.0


def test_files_keep_what_messages_cost_and_need_not_say() -> None:
    dag = build_dag(LINE)
    plain = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
    links = {(0, 1): 0.1 + 0.2, (1, 0): 1e-9}
    text = bounds_to_json(
        dag, DurationBounds(plain.min_ms, plain.max_ms, p2p_overhead_ms=0.25, p2p_latency_ms=links)
    )
    again = bounds_from_json(dag, text)
    assert (again.p2p_overhead_ms, again.p2p_latency_ms) == (0.25, links)
    new = bounds_to_json(dag, plain)
    old = new.replace(',\n  "p2p_overhead_ms": 0.0,\n  "p2p_latency_ms": {}', "")
    assert old != new
    again = bounds_from_json(dag, old)
    assert (again.p2p_overhead_ms, again.p2p_latency_ms) == (0.0, {})
    with pytest.raises(ValueError, match="p2p_latency_ms"):
        bounds_from_json(dag, text.replace('"0>1"', '"0-1"'))


@pytest.mark.parametrize("transfer_ms", [-1.0, float("nan"), float("inf")])
def test_refuses_transfers_that_make_no_sense(transfer_ms: float) -> None:
    dag = build_dag(LINE)
    plain = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
    bounds = DurationBounds(plain.min_ms, plain.max_ms, p2p_latency_ms={(0, 1): transfer_ms})
    with pytest.raises(ValueError, match=r"the delay from 0F0 to 1F0 is"):
        validate_bounds(dag, bounds)
