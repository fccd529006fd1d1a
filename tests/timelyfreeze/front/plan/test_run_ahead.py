"""Batches behind a front and ahead of it, against closed forms and a simulation without a graph."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from tests.timelyfreeze.helpers.pipelines import hand_order, needs, split_microbatches
from timelyfreeze.front.plan import communication_ms
from timelyfreeze.front.plan.run_ahead import RunAhead, behind_front, run_ahead
from timelyfreeze.schedule.dag import makespan, start_times
from timelyfreeze.schedule.order import (
    Action,
    ActionKind,
    ScheduleOrder,
    gpipe_order,
    one_f_one_b_order,
)

MAKERS = {"GPipe": gpipe_order, "1F1B": one_f_one_b_order}
F, B = 2.0, 5.0
Times = dict[tuple[int, ActionKind], float]


def uniform(action: Action) -> float:
    return F if action.kind is ActionKind.FORWARD else B


def durations(actions: tuple[Action, ...], of: Callable[[Action], float]) -> np.ndarray:
    return np.array([of(action) for action in actions])


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("s", "m", "f"), [(4, 8, 1), (4, 8, 3), (6, 6, 2), (3, 3, 0)])
def test_behind_the_front_is_a_shorter_pipeline(name: str, s: int, m: int, f: int) -> None:
    dag = behind_front(MAKERS[name](s, m), f)
    assert makespan(dag, durations(dag.actions, uniform)) == (m + s - f - 1) * (F + B)
    assert {action.stage for action in dag.actions} == set(range(f, s))
    assert dag.ranks.min() == f


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("s", "m", "f"), [(4, 8, 1), (4, 8, 2), (4, 8, 3), (6, 6, 2)])
def test_ahead_of_a_front_only_the_first_batch_waits_for_it(
    name: str, s: int, m: int, f: int
) -> None:
    batches = run_ahead(MAKERS[name](s, m), f, n_batches=6)
    ends = batches.batch_ends_ms(durations(batches.dag.actions, uniform))
    live = (m + s - f - 1) * (F + B)
    if name == "GPipe":
        assert ends[0] == (m + s - 1) * F + (m + s - f - 1) * B
    assert np.diff(ends) == pytest.approx([live] * 5)
    assert batches.batch_ms(durations(batches.dag.actions, uniform)) == pytest.approx(live)


def test_no_front_is_one_batch_after_the_other() -> None:
    order = one_f_one_b_order(3, 4)
    batches = run_ahead(order, 0, n_batches=3)
    ends = batches.batch_ends_ms(durations(batches.dag.actions, uniform))
    assert ends == tuple(n * (4 + 3 - 1) * (F + B) for n in (1, 2, 3))


def test_a_front_that_is_slow_sets_the_pace() -> None:
    # One stage of 9 ms a microbatch in front of one of 2 + 5: 3 x 9 a batch, for ever.
    batches = run_ahead(gpipe_order(2, 3), 1)
    times = durations(batches.dag.actions, lambda a: uniform(a) if a.stage else 9.0)
    assert batches.batch_ms(times) == pytest.approx(27.0)


def test_the_front_is_one_batch_ahead_and_no_more() -> None:
    # A quick front: its third batch begins when the first one ends, not at once.
    batches = run_ahead(gpipe_order(2, 2), 1, n_batches=3)
    times = durations(batches.dag.actions, lambda a: uniform(a) if a.stage else 1.0)
    start = dict(zip(batches.dag.actions, start_times(batches.dag, times), strict=True))
    first = [start[Action(0, ActionKind.FORWARD, m)] for m in range(6)]
    # The first batch: 1 ms, then 2 x (2 + 5) on the live stage.
    assert first == [0.0, 1.0, 2.0, 3.0, 15.0, 16.0]


def test_a_long_chain_in_front_of_few_microbatches_takes_two_batches() -> None:
    # Five stages of 4 ms in front of one of 1 + 1, one microbatch: a batch may be begun when the
    # one before the last ends, so two of them take 5 x 4 + 2.
    batches = run_ahead(gpipe_order(6, 1), 5)
    times = durations(batches.dag.actions, lambda a: 4.0 if a.stage < 5 else 1.0)
    assert batches.batch_ms(times) == pytest.approx(22.0 / 2)


def test_the_last_batch_does_not_count_for_no_front_works_beside_it() -> None:
    # On one core all work is done in turn: three forwards of the front, and 3 x (2 + 5).
    batches = run_ahead(gpipe_order(2, 3), 1)
    times = durations(batches.dag.actions, lambda a: uniform(a) if a.stage else 1.0)
    assert batches.batch_ms(times, n_processors=1.0) == pytest.approx(3 * (1.0 + 2.0 + 5.0))


def test_edges_between_batches_carry_no_message() -> None:
    batches = run_ahead(gpipe_order(2, 2), 1, n_batches=3)
    delays = np.where(batches.within_batch, 10.0, 0.0)
    ranks = batches.dag.ranks[batches.dag.edges]
    delays[ranks[:, 0] == ranks[:, 1]] = 0.0
    times = durations(batches.dag.actions, lambda a: uniform(a) if a.stage else 1.0)
    # The first message is under way for 10 ms; the others while the live stage works.
    ends = batches.batch_ends_ms(times, delays_ms=delays)
    assert ends == (25.0, 39.0, 53.0)


def simulated_ends(order: ScheduleOrder, n_front: int, n_batches: int, times: Times) -> list[float]:
    """Ends of batches by the words of the rule: every rank runs its next action once it may."""
    split = split_microbatches(order)
    rows = []
    for row in order.ranks:
        front = [a for a in row if a.stage < n_front and a.kind is ActionKind.FORWARD]
        rest = [a for a in row if a in front or a.stage >= n_front]
        queue = [(0, a) for a in front]
        for batch in range(n_batches):
            queue += [(batch + (a in front), a) for a in rest if batch + (a in front) < n_batches]
        rows.append(queue)
    n_live = [sum(a.stage >= n_front for row in order.ranks for a in row)] * n_batches
    done: dict[tuple[int, Action], float] = {}
    ends = [0.0] * n_batches
    free = [0.0] * len(rows)
    while any(rows):
        for rank, row in enumerate(rows):
            while row:
                batch, action = row[0]
                before = [
                    (batch, a)
                    for a in needs(action, split, order.n_stages)
                    if a.stage >= n_front or a.kind is ActionKind.FORWARD
                ]
                gate = batch - 1 if action.stage >= n_front else batch - 2
                if any(key not in done for key in before) or (gate >= 0 and n_live[gate]):
                    break
                opened = ends[gate] if gate >= 0 else 0.0
                begin = max([free[rank], opened, *(done[key] for key in before)])
                free[rank] = done[batch, action] = begin + times[action.stage, action.kind]
                if action.stage >= n_front:
                    n_live[batch] -= 1
                    ends[batch] = max(ends[batch], free[rank])
                row.pop(0)
    return ends


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", [*MAKERS, "interleaved", "v_shape", "zero_bubble"])
def test_batches_in_a_row_are_those_of_a_simulation(name: str, seed: int) -> None:
    rng = random.Random(f"{name}{seed}")
    s = rng.randint(2, 5)
    order = MAKERS[name](s, rng.randint(s, 7)) if name in MAKERS else hand_order(name)
    n_front = rng.randrange(order.n_stages)
    times = {
        (st, kind): rng.uniform(0.5, 5.0) for st in range(order.n_stages) for kind in ActionKind
    }
    batches = run_ahead(order, n_front, n_batches=7)
    own = durations(batches.dag.actions, lambda a: times[a.stage, a.kind])
    ends = batches.batch_ends_ms(own)
    assert ends == pytest.approx(simulated_ends(order, n_front, 7, times))
    assert batches.batch_ms(own) == pytest.approx((ends[5] - ends[1]) / 4)


@pytest.mark.parametrize("seed", range(4))
def test_ten_batches_tell_the_time_of_the_hundredth(seed: int) -> None:
    rng = random.Random(seed)
    order = MAKERS[rng.choice(["GPipe", "1F1B"])](4, 6)
    n_front = rng.randint(1, 3)
    times = {(st, kind): rng.uniform(0.5, 5.0) for st in range(4) for kind in ActionKind}

    def batch_ms(batches: RunAhead) -> float:
        return batches.batch_ms(durations(batches.dag.actions, lambda a: times[a.stage, a.kind]))

    long = run_ahead(order, n_front, n_batches=100)
    assert batch_ms(run_ahead(order, n_front)) == pytest.approx(batch_ms(long), rel=0.01)


def test_communication_by_hand() -> None:
    # 3 buckets: 2 ms of latency to each of 3 others; 2 * 100 * 3 / (4 * 50) = 3 ms.
    assert communication_ms(3, 100.0, 4, 50.0, 2.0) == 3 * (2 * 3 + 3)
    assert communication_ms(3, 100.0, 1, 50.0, 2.0) == 0.0
    assert communication_ms(0, 100.0, 4, 50.0, 2.0) == 0.0


def test_more_replicas_send_ever_closer_to_twice_the_gradients() -> None:
    sent = [communication_ms(1, 100.0, n, 1.0) for n in (2, 4, 100)]
    assert sent == [100.0, 150.0, 198.0]
