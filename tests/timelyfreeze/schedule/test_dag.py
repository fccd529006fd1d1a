import heapq
import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timelyfreeze.helpers.pipelines import (
    BY_HAND,
    TWO_BY_TWO,
    V_SHAPE,
    critical_path,
    hand_order,
    needs,
    random_order,
    split_microbatches,
)
from timelyfreeze.schedule.dag import build_dag, connect, makespan, start_times
from timelyfreeze.schedule.order import (
    Action,
    ScheduleError,
    ScheduleOrder,
    gpipe_order,
    one_f_one_b_order,
    parse_action,
    parse_order,
)

seeds = st.integers(0, 10**6)


def simulate(order: ScheduleOrder, duration: dict[Action, float]) -> dict[Action, float]:
    """Play the pipeline event by event: a free rank starts the head of its queue once it may."""
    split = split_microbatches(order)
    queues = [list(row) for row in order.ranks]
    busy = [False] * order.n_ranks
    started: dict[Action, float] = {}
    finished: set[Action] = set()
    events: list[tuple[float, int, int, Action]] = []
    tiebreak = itertools.count()

    def start_what_can(now: float) -> None:
        for rank, queue in enumerate(queues):
            if queue and not busy[rank]:
                action = queue[0]
                if finished.issuperset(needs(action, split, order.n_stages)):
                    queue.pop(0)
                    busy[rank] = True
                    started[action] = now
                    event = (now + duration[action], next(tiebreak), rank, action)
                    heapq.heappush(events, event)

    start_what_can(0.0)
    while events:
        now, _, rank, action = heapq.heappop(events)
        finished.add(action)
        busy[rank] = False
        start_what_can(now)
    assert not any(queues), "the simulated pipeline hangs"
    return started


def words(*texts: str) -> set[str]:
    return {word for text in texts for word in text.split()}


def edge_texts(rows: list[str]) -> set[str]:
    dag = build_dag(parse_order(rows))
    return {f"{dag.actions[i]}>{dag.actions[j]}" for i, j in dag.edges.tolist()}


def test_edges_by_hand() -> None:
    assert edge_texts(TWO_BY_TWO) == words(
        "0F0>0F1 0F1>0B0 0B0>0B1 1F0>1F1 1F1>1B0 1B0>1B1",  # order on each rank
        "0F0>1F0 0F1>1F1 1B0>0B0 1B1>0B1",  # between stages
        "0F0>0B0 0F1>0B1 1F0>1B0 1F1>1B1",  # within a stage
    )


def test_edges_where_split_and_full_backwards_meet() -> None:
    edges = edge_texts(V_SHAPE)
    on_rank = {f"{a}>{b}" for row in V_SHAPE for a, b in itertools.pairwise(row.split())}
    from_backwards = {edge for edge in edges - on_rank if edge[1] != "F"}
    assert from_backwards == words(
        "3I0>2B0 1I0>0B0 3I1>2B1 1B1>0B1",  # between stages
        "1I0>1W0 3I0>3W0 3I1>3W1",  # within a stage
    )
    assert {"2B0>1I0", "2B1>1B1"} <= edges & on_rank


def test_a_graph_of_other_rows_by_hand() -> None:
    rows = [[parse_action(word) for word in text.split()] for text in ("0F0 0F1", "", "1F0")]
    dag = connect(rows, [(rows[0][0], rows[2][0]), (rows[2][0], rows[0][1])], n_stages=3)
    edges = {f"{dag.actions[i]}>{dag.actions[j]}" for i, j in dag.edges.tolist()}
    assert edges == words("0F0>0F1 0F0>1F0 1F0>0F1")
    assert dag.ranks.tolist() == [0, 0, 2]
    assert makespan(dag, [1.0, 2.0, 4.0]) == 7.0
    with pytest.raises(ScheduleError, match="would hang"):
        connect(rows, [(rows[0][1], rows[2][0]), (rows[2][0], rows[0][0])], n_stages=3)


@given(seeds)
def test_dag_is_complete_and_acyclic(seed: int) -> None:
    order = random_order(seed)
    dag = build_dag(order)
    assert dag.actions == tuple(a for row in order.ranks for a in row)
    assert [dag.index[a] for a in dag.actions] == list(range(len(dag.actions)))
    position = np.empty(len(dag.actions), dtype=np.int64)
    position[dag.topological] = np.arange(len(dag.actions))
    assert (position[dag.edges[:, 0]] < position[dag.edges[:, 1]]).all()
    split = split_microbatches(order)
    wanted = {(p, a) for a in dag.actions for p in needs(a, split, order.n_stages)}
    wanted |= {pair for row in order.ranks for pair in itertools.pairwise(row)}
    edges = [(dag.actions[i], dag.actions[j]) for i, j in dag.edges.tolist()]
    # F -> B within a stage is a need as well, so the two sets must agree edge for edge.
    assert set(edges) == wanted
    assert len(set(edges)) == len(edges)
    assert dag.stages.tolist() == [a.stage for a in dag.actions]
    assert dag.freezable.tolist() == [a.kind.value in "BW" for a in dag.actions]


def test_arrays_cannot_be_changed() -> None:
    dag = build_dag(hand_order("two_by_two"))
    for array in (dag.edges, dag.topological, dag.stages, dag.freezable):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@given(seeds, seeds)
def test_start_times_are_those_of_a_simulated_pipeline(seed: int, duration_seed: int) -> None:
    order = random_order(seed)
    dag = build_dag(order)
    rng = np.random.default_rng(duration_seed)
    durations = rng.uniform(0.0, 3.0, len(dag.actions)) * (rng.random(len(dag.actions)) < 0.8)
    played = simulate(order, dict(zip(dag.actions, durations.tolist(), strict=True)))
    assert start_times(dag, durations).tolist() == [played[a] for a in dag.actions]
    assert makespan(dag, durations) == max(
        played[a] + d for a, d in zip(dag.actions, durations, strict=True)
    )


@pytest.mark.parametrize("generate", [gpipe_order, one_f_one_b_order])
@pytest.mark.parametrize(("n_stages", "n_microbatches"), [(1, 1), (2, 5), (4, 8), (8, 9)])
def test_makespan_closed_form(generate, n_stages: int, n_microbatches: int) -> None:
    # Equal stages, F = 1 and B = 2: each of the M microbatches costs 3, and so does each of the
    # S - 1 slots of filling and draining.
    dag = build_dag(generate(n_stages, n_microbatches))
    durations = np.where(dag.freezable, 2.0, 1.0)
    assert makespan(dag, durations) == 3.0 * (n_microbatches + n_stages - 1)


def test_batch_may_end_on_another_stage() -> None:
    # Without the implicit edge from every last action, the batch would seem to end with 0W0 at 5.
    dag = build_dag(parse_order(["0F0 0I0 0W0", "1F0 1I0 1W0"]))
    durations = [7.0 if str(a) == "1W0" else 1.0 for a in dag.actions]
    assert makespan(dag, durations) == 10.0
    assert " ".join(map(str, critical_path(dag, durations))) == "0F0 1F0 1I0 1W0"


@given(seeds, seeds)
def test_critical_path_is_a_chain_as_long_as_the_batch(seed: int, duration_seed: int) -> None:
    dag = build_dag(random_order(seed))
    durations = np.random.default_rng(duration_seed).uniform(0.1, 3.0, len(dag.actions))
    chain = [dag.index[a] for a in critical_path(dag, durations)]
    edges = set(map(tuple, dag.edges.tolist()))
    assert all(pair in edges for pair in itertools.pairwise(chain))
    assert sum(durations[chain].tolist()) == pytest.approx(makespan(dag, durations), rel=1e-12)


def test_a_long_circle_is_told_in_part() -> None:
    n = 300
    # Rank 1 takes forwards from the end, rank 0 the last one behind its first backward.
    forwards = [f"0F{m}" for m in range(n - 1)]
    order = parse_order(
        [
            " ".join([*forwards, "0B0", f"0F{n - 1}", *(f"0B{m}" for m in range(1, n))]),
            " ".join([*(f"1F{m}" for m in reversed(range(n))), *(f"1B{m}" for m in range(n))]),
        ]
    )
    with pytest.raises(ScheduleError, match="waits for the one before it") as error:
        build_dag(order)
    assert len(str(error.value)) < 800


def test_circle_is_named() -> None:
    # Rank 1 waits for forward 1 before its backward 0, rank 0 the other way round.
    order = parse_order(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"])
    with pytest.raises(ScheduleError, match="would hang") as error:
        build_dag(order)
    match = re.search(r"before it: (.*); reorder", str(error.value))
    assert match is not None
    circle = match[1].split(" -> ")
    assert circle[0] == circle[-1]
    assert set(circle) == {"0B0", "0F1", "1F1", "1B0"}
    start = circle.index("0B0")
    unrolled = circle[start:-1] + circle[:start]
    assert unrolled == ["0B0", "0F1", "1F1", "1B0"]


@pytest.mark.parametrize(
    ("durations", "message"),
    [
        ([1.0] * 7, r"shape \(7,\); it needs one number for each of the 8"),
        ([[1.0] * 8], r"shape \(1, 8\)"),
        ([1.0] * 7 + [-1.0], r"action 1B1 is -1.0 ms"),
        ([1.0, float("nan")] + [1.0] * 6, r"action 0F1 is nan ms"),
        ([float("inf")] + [1.0] * 7, r"action 0F0 is inf ms"),
    ],
)
def test_refuses_durations(durations: list[float], message: str) -> None:
    dag = build_dag(hand_order("two_by_two"))
    for function in (start_times, makespan, critical_path):
        with pytest.raises(ValueError, match=message):
            function(dag, durations)


@pytest.mark.parametrize("name", BY_HAND)
def test_orders_by_hand_can_be_executed(name: str) -> None:
    dag = build_dag(hand_order(name))
    assert {parse_action(t) for row in BY_HAND[name] for t in row.split()} == set(dag.actions)
