"""Pipelines for the tests: orders written by hand, and random ones that can always be executed."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from timelyfreeze.schedule.dag import PipelineDag, critical_positions, start_times
from timelyfreeze.schedule.order import Action, ActionKind, ScheduleOrder, build_order, parse_order
from timelyfreeze.timing.bounds import DurationBounds

TWO_BY_TWO = ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]
INTERLEAVED = [
    "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
    "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
]
ZERO_BUBBLE = [
    "0F0 0F1 0I0 0F2 0W0 0I1 0W1 0I2 0W2",
    "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
]
# Stages 0 and 3 on one rank, 1 and 2 on the other; some backwards split and some not.
V_SHAPE = [
    "0F0 0F1 3F0 3I0 3F1 3I1 3W0 3W1 0B0 0B1",
    "1F0 2F0 1F1 2F1 2B0 1I0 2B1 1B1 1W0",
]
BY_HAND = {
    "two_by_two": TWO_BY_TWO,
    "interleaved": INTERLEAVED,
    "zero_bubble": ZERO_BUBBLE,
    "v_shape": V_SHAPE,
}


def critical_path(
    dag: PipelineDag, durations_ms: ArrayLike, delays_ms: ArrayLike | None = None
) -> tuple[Action, ...]:
    """The chain of actions that a batch waits for, from durations instead of ends."""
    end_ms = start_times(dag, durations_ms, delays_ms) + np.asarray(durations_ms)
    return tuple(dag.actions[i] for i in critical_positions(dag, end_ms, delays_ms))


def needs(action: Action, split: set[tuple[int, int]], n_stages: int) -> list[Action]:
    """What an action waits for apart from its rank, written without looking at the library."""
    s, m = action.stage, action.microbatch

    def gradient_of(stage: int) -> Action:
        is_split = (stage, m) in split
        return Action(stage, ActionKind.INPUT_BACKWARD if is_split else ActionKind.FULL_BACKWARD, m)

    if action.kind is ActionKind.FORWARD:
        return [Action(s - 1, ActionKind.FORWARD, m)] if s else []
    if action.kind is ActionKind.WEIGHT_BACKWARD:
        return [Action(s, ActionKind.INPUT_BACKWARD, m)]
    above = [gradient_of(s + 1)] if s + 1 < n_stages else []
    return [Action(s, ActionKind.FORWARD, m), *above]


def split_microbatches(order: ScheduleOrder) -> set[tuple[int, int]]:
    """The (stage, microbatch) pairs whose backward is split."""
    return {
        (a.stage, a.microbatch)
        for row in order.ranks
        for a in row
        if a.kind is ActionKind.INPUT_BACKWARD
    }


def random_order(seed: int) -> ScheduleOrder:
    """An order found by running actions at random as they become ready, so it cannot hang."""
    rng = random.Random(seed)
    n_ranks = rng.randint(1, 3)
    n_stages = rng.randint(n_ranks, 5)
    n_microbatches = rng.randint(1, 4)
    holder = [*range(n_ranks), *(rng.randrange(n_ranks) for _ in range(n_stages - n_ranks))]
    rng.shuffle(holder)
    fraction = rng.choice([0.0, 0.5, 1.0])
    pairs = [(s, m) for s in range(n_stages) for m in range(n_microbatches)]
    split = {pair for pair in pairs if rng.random() < fraction}
    waiting = [
        Action(s, kind, m)
        for s, m in pairs
        for kind in (
            (ActionKind.FORWARD, ActionKind.INPUT_BACKWARD, ActionKind.WEIGHT_BACKWARD)
            if (s, m) in split
            else (ActionKind.FORWARD, ActionKind.FULL_BACKWARD)
        )
    ]
    rows: list[list[Action]] = [[] for _ in range(n_ranks)]
    done: set[Action] = set()
    while waiting:
        ready = [a for a in waiting if done.issuperset(needs(a, split, n_stages))]
        action = rng.choice(ready)
        waiting.remove(action)
        done.add(action)
        rows[holder[action.stage]].append(action)
    return build_order(rows)


def hand_order(name: str) -> ScheduleOrder:
    return parse_order(BY_HAND[name])


def eager_order(n_stages: int = 4, n_microbatches: int = 8) -> ScheduleOrder:
    """1F1B with one forward more in front, a schedule that torch does not have."""
    rows = []
    for stage in range(n_stages):
        ahead = min(n_microbatches, n_stages - stage + 1)
        row = [f"{stage}F{m}" for m in range(ahead)]
        for m in range(n_microbatches):
            row.append(f"{stage}B{m}")
            if m + ahead < n_microbatches:
                row.append(f"{stage}F{m + ahead}")
        rows.append(" ".join(row))
    return parse_order(rows)


def random_bounds(dag: PipelineDag, seed: int) -> DurationBounds:
    """Durations of 0.5 to 5 ms; freezing saves between nothing and all of a freezable action."""
    rng = np.random.default_rng(seed)
    longest = rng.uniform(0.5, 5.0, len(dag.actions))
    saved = rng.choice([0.0, 0.3, 0.6, 1.0], len(dag.actions)) * dag.freezable
    return DurationBounds(min_ms=longest * (1.0 - saved), max_ms=longest)


def simulate(
    order: ScheduleOrder, duration_ms: Callable[[Action], float]
) -> dict[Action, tuple[float, float]]:
    """Start and end of every action on one common clock: each rank runs its next action once it
    has what it needs, written without looking at the library.
    """
    split = split_microbatches(order)
    times: dict[Action, tuple[float, float]] = {}
    waiting = [list(row) for row in order.ranks]
    free_at = [0.0] * order.n_ranks
    while any(waiting):
        for rank, row in enumerate(waiting):
            while row and all(a in times for a in needs(row[0], split, order.n_stages)):
                action = row.pop(0)
                arrived = [times[a][1] for a in needs(action, split, order.n_stages)]
                start = max([free_at[rank], *arrived])
                free_at[rank] = start + duration_ms(action)
                times[action] = (start, free_at[rank])
    return times
