"""Clocks of several processes, aligned by the order of causes and effects.

A process times its actions since a moment of its own (CUDA events, or another host). Messages are
sent before they are received, and so bound the distance of two clocks from below, in the other
direction from above. Notation: N clocks.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from timelyfreeze.schedule import Action, PipelineDag, check_delays

# When an action began and ended by its clock, milliseconds.
Intervals = Mapping[Action, tuple[float, float]]


def min_distances(
    dag: PipelineDag, clocks: Sequence[Intervals], delays_ms: ArrayLike | None = None
) -> NDArray[np.float64]:
    """Return how much later than clock a's zero clock b's zero lies at least, by messages a to b.

    Together the clocks have seen all actions. Shape [N, N]; minus infinity where no edge leads from
    a to b, and on the diagonal.
    """
    holder = {action: clock for clock, seen in enumerate(clocks) for action in seen}
    missing = [str(action) for action in dag.actions if action not in holder]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(dag.actions)} actions of the batch were seen by no process, "
            f"such as {missing[0]}"
        )
    delays = check_delays(dag, delays_ms)
    distances = np.full((len(clocks), len(clocks)), -np.inf)
    for (i, j), delay in zip(dag.edges.tolist(), delays.tolist(), strict=True):
        before, after = dag.actions[i], dag.actions[j]
        a, b = holder[before], holder[after]
        if a != b:
            distance = clocks[a][before][1] + delay - clocks[b][after][0]
            distances[a, b] = max(distances[a, b], distance)
    return distances


def clock_offsets(min_ms: ArrayLike) -> NDArray[np.float64]:
    """Return each clock's zero in the time of the first.

    Offsets o must keep o_b - o_a >= ``min_ms[a, b]``. The earliest and latest such offsets are
    shortest paths; their middle, which keeps the rules too, is returned, right for messages equally
    long in both directions. Where no offsets keep all rules (overestimated delays, uneven clocks),
    all rules give way by the same smallest amount: the largest mean over a circle of rules. Minus
    infinity is no rule; rules have to tie every clock to the first, which is at 0, from both sides.
    """
    distances = np.array(min_ms, dtype=np.float64)
    np.fill_diagonal(distances, -np.inf)
    paths = distances - max(0.0, _largest_cycle_mean(distances))
    np.fill_diagonal(paths, 0.0)
    for via in range(len(paths)):
        paths = np.maximum(paths, paths[:, via, None] + paths[None, via, :])
    earliest, latest = paths[0], -paths[:, 0]
    loose = np.flatnonzero(~(np.isfinite(earliest) & np.isfinite(latest)))
    if loose.size:
        raise ValueError(
            f"process {loose[0]} does not both receive from and send to process 0, if only by way "
            "of others, so their clocks cannot be brought together"
        )
    # Both begin with 0, but for rounding where rules gave way.
    middle: NDArray[np.float64] = (earliest + latest) / 2.0
    return middle


def _largest_cycle_mean(weights: NDArray[np.float64]) -> float:
    """Return the largest mean weight of a circle; minus infinity without circles.

    A circle of k edges, at most N, shows on the diagonal of the k-th power, with sums in place of
    products and the maximum in place of sums.
    """
    largest = -np.inf
    power = weights
    for length in range(1, len(weights) + 1):
        largest = max(largest, float(np.diag(power).max()) / length)
        power = (power[:, :, None] + weights[None, :, :]).max(axis=1)
    return largest
