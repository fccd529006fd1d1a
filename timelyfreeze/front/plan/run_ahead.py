"""Batches of a pipeline with first stages frozen for good, and so free of the others.

A stage frozen for good has no backward and constant weights. Where its output is known, a batch
begins behind the stage; elsewhere the stage may forward the next batch early.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from timelyfreeze.schedule import (
    Action,
    ActionKind,
    PipelineDag,
    ScheduleOrder,
    connect,
    dependencies,
)
from timelyfreeze.timing import play_actions

# Batches that are played to find the time of one. The first ones find the front not yet ahead, and
# beside the last one no front works. Four before it count: their mean also holds where batches take
# long and short times in turn.
N_BATCHES, _N_COUNTED = 10, 4


def behind_front(order: ScheduleOrder, n_front: int) -> PipelineDag:
    """Return the graph of a batch begun behind ``n_front`` idle stages.

    Ranks stay; a rank without other stages has no actions.
    """
    rows = [[action for action in row if action.stage >= n_front] for row in order.ranks]
    pairs = [(a, b) for a, b in dependencies(order) if min(a.stage, b.stage) >= n_front]
    return connect(rows, pairs, order.n_stages)


@dataclass(frozen=True)
class RunAhead:
    """Several batches in a row; microbatches are numbered on through all of them."""

    dag: PipelineDag  # the graph of all of them
    n_front: int  # stages that run ahead
    n_microbatches: int  # microbatches of a batch
    n_batches: int  # number of batches
    # bool, shape [E]. Which edges connect actions of one batch; the others stand for the end of a
    # step and carry no message
    within_batch: NDArray[np.bool_]

    def batch_ends_ms(
        self,
        durations_ms: ArrayLike,
        n_processors: float | None = None,
        delays_ms: ArrayLike | None = None,
    ) -> tuple[float, ...]:
        """Return the end of each batch, from the start of the first, as ``simulate_batch``."""
        _, ends = play_actions(self.dag, durations_ms, n_processors, delays_ms)
        latest = np.zeros(self.n_batches)
        batches = [action.microbatch // self.n_microbatches for action in self.dag.actions]
        np.maximum.at(latest, batches, np.where(self.dag.stages >= self.n_front, ends, 0.0))
        return tuple(latest.tolist())

    def batch_ms(
        self,
        durations_ms: ArrayLike,
        n_processors: float | None = None,
        delays_ms: ArrayLike | None = None,
    ) -> float:
        """Return the time of a batch once the front is ahead; arguments as ``simulate_batch``."""
        ends = self.batch_ends_ms(durations_ms, n_processors, delays_ms)
        return (ends[-2] - ends[-2 - _N_COUNTED]) / _N_COUNTED


def run_ahead(order: ScheduleOrder, n_front: int, n_batches: int = N_BATCHES) -> RunAhead:
    """Let the first stages forward the next batch during the work on the present.

    A single batch ahead at most: the front begins a batch when live stages begin its predecessor,
    with room for the messages of a batch. A step ends, and the next begins, when all live stages
    are done. A rank with stages of both kinds runs them in the order of the schedule, the front's
    for the batch to come. All stages but the last may run ahead; ``RunAhead.batch_ms`` needs 6
    batches or more.
    """
    n = order.n_microbatches

    def of_batch(action: Action, batch: int) -> Action:
        return Action(action.stage, action.kind, batch * n + action.microbatch)

    def row_of(row: tuple[Action, ...]) -> Iterator[Action]:
        yield from (a for a in row if a.stage < n_front and a.kind is ActionKind.FORWARD)
        for batch in range(n_batches):
            for action in row:
                if action.stage >= n_front:
                    yield of_batch(action, batch)
                elif action.kind is ActionKind.FORWARD and batch + 1 < n_batches:
                    yield of_batch(action, batch + 1)

    rows = [tuple(row_of(row)) for row in order.ranks]
    # The front has forwards alone.
    handed = [
        pair
        for pair in dependencies(order)
        if all(a.stage >= n_front or a.kind is ActionKind.FORWARD for a in pair)
    ]
    waits = [(of_batch(a, b), of_batch(c, b)) for a, c in handed for b in range(n_batches)]
    live = [[a for a in row if a.stage >= n_front] for row in order.ranks]
    live = [row for row in live if row]
    opening = next(a for row in order.ranks for a in row if a.stage == 0)
    for batch in range(n_batches - 1):
        ends = [of_batch(row[-1], batch) for row in live]
        begins = [of_batch(row[0], batch + 1) for row in live]
        if n_front and batch + 2 < n_batches:
            begins.append(of_batch(opening, batch + 2))
        waits.extend((end, begin) for end in ends for begin in begins)
    dag = connect(rows, waits, order.n_stages)
    batch_of = np.array([action.microbatch // n for action in dag.actions])
    edges = batch_of[dag.edges]
    return RunAhead(dag, n_front, n, n_batches, edges[:, 0] == edges[:, 1])


def communication_ms(
    n_buckets: int,
    bucket_bytes: float,
    n_workers: int,
    bytes_per_ms: float,
    latency_ms: float = 0.0,
) -> float:
    """Return T_comm = k (a (p - 1) + 2 b (p - 1) / (p BW)): gradients of a step, summed by a ring.

    There are k buckets of b bytes, those of frozen layers left out and a last, smaller one counted
    whole, p replicas, a bandwidth BW and a latency a of messages.
    """
    others = n_workers - 1
    return n_buckets * (
        latency_ms * others + 2.0 * bucket_bytes * others / (n_workers * bytes_per_ms)
    )
