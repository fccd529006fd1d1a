"""Messages that take time between ranks: in start times, play-throughs, plans and files."""

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.timelyfreeze.pipelines import random_bounds, random_order
from timelyfreeze.bounds import (
    DurationBounds,
    bounds_from_json,
    bounds_to_json,
    uniform_bounds,
    validate_bounds,
)
from timelyfreeze.dag import (
    PipelineDag,
    build_dag,
    critical_path,
    edge_delays,
    makespan,
    start_times,
)
from timelyfreeze.lp import solve_freeze_ratios
from timelyfreeze.messages import message_time
from timelyfreeze.order import parse_order
from timelyfreeze.plan import plan_from_ratios
from timelyfreeze.processors import play_batch

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
    """A batch played event by event: whatever has ended sends, whatever has all of it begins."""
    missing = dict.fromkeys(range(len(dag.actions)), 0)
    sends: dict[int, list[tuple[int, float]]] = {i: [] for i in missing}
    for (i, j), delay in zip(dag.edges.tolist(), delays.tolist(), strict=True):
        missing[j] += 1
        sends[i].append((j, delay))
    events = [(durations[i], "ends", i) for i in missing if missing[i] == 0]
    heapq.heapify(events)
    last = 0.0
    while events:
        now, what, i = heapq.heappop(events)
        if what == "ends":
            last = max(last, now)
            for j, delay in sends[i]:
                heapq.heappush(events, (now + delay, "arrives", j))
        else:
            missing[i] -= 1
            if missing[i] == 0:
                heapq.heappush(events, (now + durations[i], "ends", i))
    return last


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


@given(seed=SEEDS, share=st.sampled_from([None, 0.999999999]))
@settings(deadline=None, max_examples=60)
def test_a_batch_lasts_as_long_as_its_events(seed: int, share: float | None) -> None:
    """Shared processors that are almost enough take the other way through the code."""
    dag = build_dag(random_order(seed))
    rng = np.random.default_rng(seed)
    durations = rng.choice([0.0, 0.5, 1.0, float(rng.uniform(0.1, 5.0))], len(dag.actions))
    delays = edge_delays(dag, random_links(dag, seed))
    n_processors = None if share is None else share * (int(dag.ranks.max()) + 1)
    _, batch_ms = play_batch(dag, durations, n_processors, delays)
    assert batch_ms == pytest.approx(by_events(dag, durations, delays), rel=1e-6)


@given(seed=SEEDS, n_processors=st.floats(0.5, 3.0))
@settings(deadline=None, max_examples=60)
def test_messages_on_their_way_take_no_processor(seed: int, n_processors: float) -> None:
    dag = build_dag(random_order(seed))
    durations = np.random.default_rng(seed).uniform(0.1, 2.0, len(dag.actions))
    delays = edge_delays(dag, random_links(dag, seed))
    start, batch_ms = play_batch(dag, durations, n_processors, delays)
    without_ms = play_batch(dag, durations, n_processors)[1]
    assert batch_ms >= makespan(dag, durations, delays) - 1e-9
    assert batch_ms <= without_ms + delays.sum() + 1e-9
    for (i, j), delay in zip(dag.edges.tolist(), delays, strict=True):
        assert start[j] >= start[i] + durations[i] + delay - 1e-9


@given(seed=SEEDS, cap=st.sampled_from([0.0, 0.3, 0.8, 1.0]))
@settings(deadline=None, max_examples=40)
def test_a_plan_takes_messages_into_account(seed: int, cap: float) -> None:
    dag = build_dag(random_order(seed))
    plain = random_bounds(dag, seed)
    bounds = DurationBounds(plain.min_ms, plain.max_ms, transfers_ms=random_links(dag, seed))
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
    slow = DurationBounds(plain.min_ms, plain.max_ms, transfers_ms={(0, 1): 7.0, (1, 0): 7.0})
    plan = solve_freeze_ratios(dag, slow, max_freeze_ratio=0.5)
    assert plan.batch_ms == 1 + 7 + 1 + 1.5 + 7 + 1.5
    assert plan.unfrozen_batch_ms == 20.0


def test_a_price_is_what_transfers_leave_unexplained() -> None:
    dag = build_dag(LINE)
    durations = np.ones(len(dag.actions))
    delays = edge_delays(dag, {(0, 1): 0.5, (1, 0): 0.5})
    measured_ms = makespan(dag, durations, delays)
    assert message_time(dag, durations, measured_ms) > 0.1
    assert message_time(dag, durations, measured_ms, None, delays) == 0.0


def test_files_keep_transfers_and_old_files_have_none() -> None:
    dag = build_dag(LINE)
    plain = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
    links = {(0, 1): 0.1 + 0.2, (1, 0): 1e-9}
    text = bounds_to_json(
        dag, DurationBounds(plain.min_ms, plain.max_ms, message_ms=0.25, transfers_ms=links)
    )
    again = bounds_from_json(dag, text)
    assert (again.message_ms, again.transfers_ms) == (0.25, links)
    new = bounds_to_json(dag, plain)
    old = new.replace(',\n  "message_ms": 0.0,\n  "transfers_ms": {}', "")
    assert old != new
    again = bounds_from_json(dag, old)
    assert (again.message_ms, again.transfers_ms) == (0.0, {})
    with pytest.raises(ValueError, match="transfers"):
        bounds_from_json(dag, text.replace('"0>1"', '"0-1"'))


@pytest.mark.parametrize("transfer_ms", [-1.0, float("nan"), float("inf")])
def test_refuses_transfers_that_make_no_sense(transfer_ms: float) -> None:
    dag = build_dag(LINE)
    plain = uniform_bounds(dag, forward_ms=1.0, backward_ms=(1.0, 2.0))
    bounds = DurationBounds(plain.min_ms, plain.max_ms, transfers_ms={(0, 1): transfer_ms})
    with pytest.raises(ValueError, match=r"the delay from 0F0 to 1F0 is"):
        validate_bounds(dag, bounds)
