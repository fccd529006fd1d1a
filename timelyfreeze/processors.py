"""Ranks that share processors: what a batch takes when there are fewer cores than ranks.

On GPUs every rank has a device of its own and a batch takes as long as the longest path through its graph. On a
machine with fewer cores than ranks, ranks that are ready at the same time slow each other down, and the longest path
promises too much. Then action times are taken as processor time, and a batch is played through with the processors
shared evenly among the ranks that have something to do, as an operating system's scheduler does.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.dag import PipelineDag, makespan
from timelyfreeze.order import ScheduleOrder


def batch_time(
    order: ScheduleOrder,
    dag: PipelineDag,
    durations_ms: NDArray[np.float64],
    n_processors: float | None,
) -> float:
    """Return how long a batch takes.

    Args:
        order: What each rank runs, one after the other.
        dag: The order's graph.
        durations_ms: Time of each action on a processor of its own, shape [A].
        n_processors: How many ranks can compute at once; None if every rank has its own device.
    """
    if n_processors is None or n_processors >= order.n_ranks:
        return makespan(dag, durations_ms)
    return shared_batch_time(order, dag, durations_ms, n_processors)


def shared_batch_time(
    order: ScheduleOrder,
    dag: PipelineDag,
    durations_ms: NDArray[np.float64],
    n_processors: float,
) -> float:
    """Play a batch through with ``n_processors`` shared evenly by the ranks that are ready.

    At any moment each of the n ready ranks runs at speed min(1, n_processors / n).

    Returns:
        The time in milliseconds at which the last action ends. Never below the longest path, nor below the work of all
        actions over ``n_processors``.

    Raises:
        ValueError: If ``n_processors`` is not above 0.
    """
    if not n_processors > 0:
        raise ValueError(f"n_processors is {n_processors}; it must be above 0")
    queues = [[dag.index[action] for action in actions] for actions in order.ranks]
    waiting_for = np.bincount(dag.edges[:, 1], minlength=len(dag.actions))
    successors: list[list[int]] = [[] for _ in dag.actions]
    for before, after in dag.edges.tolist():
        successors[before].append(after)
    position = [0] * len(queues)
    left_ms = durations_ms.astype(float).tolist()
    now_ms = 0.0
    while True:
        heads = [q[p] for q, p in zip(queues, position, strict=True) if p < len(q)]
        if not heads:
            return now_ms
        ready = [head for head in heads if waiting_for[head] == 0]
        assert ready  # the graph has no cycle
        speed = min(1.0, n_processors / len(ready))
        step_ms = min(left_ms[head] for head in ready)
        now_ms += step_ms / speed
        for head in ready:
            left_ms[head] -= step_ms
        for rank, queue in enumerate(queues):
            if position[rank] == len(queue):
                continue
            head = queue[position[rank]]
            if waiting_for[head] == 0 and left_ms[head] <= 0.0:
                position[rank] += 1
                for after in successors[head]:
                    waiting_for[after] -= 1
