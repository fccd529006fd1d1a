"""Shared processors: times of a batch with fewer cores than ranks.

On GPUs every rank has a device of its own and a batch takes as long as the longest path through its
graph. On a machine with fewer cores than ranks, ready ranks slow each other down, and the longest
path promises too much. Then action times are taken as processor time, and a batch is played through
with the processors shared evenly among the busy ranks, as by an operating system's scheduler.

A receiving action begins a little later than on the longest path: the message travels, a thread
wakes, the host does its bookkeeping. On a single rank this looks like a wait for a busy peer. Over
all ranks the overhead shows: measured batches take longer than their actions and dependencies
explain.
"""

import heapq
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from timelyfreeze.schedule import PipelineDag, check_delays, check_durations, start_times
from timelyfreeze.timing.bounds import DurationBounds

_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def shared_processors(dag: PipelineDag, n_processors: float | None) -> float | None:
    """Return ``n_processors`` if ranks share them, or None for a processor per rank."""
    if n_processors is None:
        return None
    if not n_processors > 0.0:
        raise ValueError(f"n_processors is {n_processors}; it must be above 0")
    return n_processors if n_processors < dag.ranks.max() + 1 else None


def simulate_batch(
    dag: PipelineDag,
    durations_ms: ArrayLike,
    n_processors: float | None = None,
    delays_ms: ArrayLike | None = None,
) -> tuple[NDArray[np.float64], float]:
    """Simulate a batch.

    While n ranks are ready, all run at speed min(1, n_processors / n). With a device for each rank
    this is Eq. 5.

    Args:
        dag: Precedence graph of A actions.
        durations_ms: Time of each action on a processor of its own, shape [A], milliseconds.
        n_processors: Number of ranks computing at once; None for a device per rank.
        delays_ms: Delays from the end of an edge's first action to the arrival at the second, shape
            [E], milliseconds, without a processor. None for no delays.

    Returns:
        Start time of each action, shape [A], and the end of the last, never below the longest path,
            nor below the work of all actions over ``n_processors``.

    Raises:
        ValueError: If the shape is not [A], a duration is negative or not finite, or
            ``n_processors`` is not above 0.
    """
    start, end = play_actions(dag, durations_ms, n_processors, delays_ms)
    return start, float(np.max(end))


def play_actions(
    dag: PipelineDag,
    durations_ms: ArrayLike,
    n_processors: float | None = None,
    delays_ms: ArrayLike | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Simulate a batch as ``simulate_batch``, and return the ends of actions too.

    Start and end are milliseconds, shape [A] both; further apart than the action's duration where
    ranks had to share processors meanwhile. Errors as ``simulate_batch``.
    """
    shared = shared_processors(dag, n_processors)
    if shared is None:
        durations = check_durations(dag, durations_ms)
        start = start_times(dag, durations, delays_ms)
        return start, start + durations
    durations = check_durations(dag, durations_ms)
    return _play_shared(dag, durations, shared, check_delays(dag, delays_ms))


def _play_shared(
    dag: PipelineDag,
    durations: NDArray[np.float64],
    n_processors: float,
    delays: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    queues = [np.flatnonzero(dag.ranks == rank).tolist() for rank in range(dag.ranks.max() + 1)]
    waiting_for = [len(before) for before in dag.incoming]
    successors: list[list[tuple[int, float]]] = [[] for _ in dag.actions]
    for (before, after), delay in zip(dag.edges.tolist(), delays.tolist(), strict=True):
        successors[before].append((after, delay))
    in_flight: list[tuple[float, int]] = []  # arrival and the action that waits for it
    left = durations.tolist()
    start = [-1.0] * len(left)
    end = [0.0] * len(left)
    position = [0] * len(queues)
    now = 0.0
    while True:
        heads = [queue[at] for queue, at in zip(queues, position, strict=True) if at < len(queue)]
        if not heads:
            return np.array(start), np.array(end)
        ready = [head for head in heads if waiting_for[head] == 0]
        if not ready:
            # The graph has no cycle, so a message is in flight.
            now = in_flight[0][0]
            _deliver(in_flight, waiting_for, now)
            continue
        for head in ready:
            if start[head] < 0.0:
                start[head] = now
        drift = max(1.0, len(ready) / n_processors)
        step = min(left[head] for head in ready)
        then = now + step * drift
        if in_flight and in_flight[0][0] < then:
            then = in_flight[0][0]
            step = (then - now) / drift
        now = then
        for head in ready:
            left[head] -= step
            if left[head] <= 0.0:
                end[head] = now
                position[dag.ranks[head]] += 1
                for after, delay in successors[head]:
                    if delay > 0.0:
                        heapq.heappush(in_flight, (now + delay, after))
                    else:
                        waiting_for[after] -= 1
        _deliver(in_flight, waiting_for, now)


def _deliver(in_flight: list[tuple[float, int]], waiting_for: list[int], now: float) -> None:
    """Deliver the messages arrived by ``now``."""
    while in_flight and in_flight[0][0] <= now:
        waiting_for[heapq.heappop(in_flight)[1]] -= 1


def usable_cores() -> float:
    """Return the number of cores of this process and its siblings.

    The size of the affinity mask, or a container's quota if lower.
    """
    cores = float(len(os.sched_getaffinity(0)))
    if _CGROUP_QUOTA.exists():
        quota, period = _CGROUP_QUOTA.read_text().split()
        if quota != "max":
            cores = min(cores, int(quota) / int(period))
    return cores


def shared_cores(n_local_ranks: int, n_threads: int) -> float | None:
    """Return how many of ``n_local_ranks`` compute at once; None for a core per rank.

    With several threads per rank (``OMP_NUM_THREADS``) processor time says little about how long an
    action takes, so then ranks are taken as if they had their own cores; ``run_train.sh`` sets one
    thread where ranks outnumber cores.
    """
    cores = usable_cores()
    return cores if n_threads == 1 and n_local_ranks > cores else None


_BISECTIONS = 40


def message_time(
    dag: PipelineDag,
    durations_ms: ArrayLike,
    measured_ms: float,
    n_processors: float | None = None,
    delays_ms: ArrayLike | None = None,
) -> float:
    """Find the cost of a message: the lead of receiving actions to explain a measured batch.

    Messages of a pipeline have the same size, so they get a single number, 0 if the actions explain
    the batch, or if no message crosses ranks.
    """
    if not np.isfinite(measured_ms):
        raise ValueError(f"the measured batch time is {measured_ms}; it must be finite")
    durations = np.asarray(durations_ms, dtype=np.float64)

    def batch_ms(lead_ms: float) -> float:
        return simulate_batch(dag, durations + lead_ms * dag.receiving, n_processors, delays_ms)[1]

    missing_ms = measured_ms - batch_ms(0.0)
    if missing_ms <= 0.0 or not dag.receiving.any():
        return 0.0
    # A batch waits for one message or more, so one cannot cost more than all that is missing.
    low, high = 0.0, missing_ms
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if batch_ms(middle) < measured_ms else (low, middle)
    return low


def with_messages(
    dag: PipelineDag, bounds: DurationBounds, p2p_overhead_ms: float
) -> DurationBounds:
    """Return bounds with the message at the beginning of receiving actions.

    Freezing shortens no message: both bounds grow by the same.
    """
    lead_ms = p2p_overhead_ms * dag.receiving
    return replace(
        bounds,
        min_ms=bounds.min_ms + lead_ms,
        max_ms=bounds.max_ms + lead_ms,
        p2p_overhead_ms=bounds.p2p_overhead_ms + p2p_overhead_ms,
    )
