"""Clocks of several processes, brought together by what must have come before what.

A process tells when each of its actions began and ended, but only since a moment of its own (CUDA
events, or another host). What it receives from another was sent before it was received, so each
message gives a lower bound on the distance of the two clocks, and one in the other direction an
upper bound. Notation: N clocks.
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
    """Return when, by the first clock, each clock shows zero.

    Offsets o must keep o_b - o_a >= ``min_ms[a, b]``. Of all that do, the earliest and the latest
    are shortest paths, and the middle between them, which keeps the rules too, is returned: where
    messages take equally long in both directions, it is right. Where no offsets keep all rules
    (delays that were assumed too long, clocks that run unevenly), every rule gives way by the same
    amount, the smallest that helps: the largest mean over a circle of rules. Minus infinity is no
    rule; rules have to tie every clock to the first, which is at 0, from both sides.
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
    """Return the largest mean weight of a circle; minus infinity where there is none.

    A circle of k edges that is no longer than N shows on the diagonal of the k-th power, with
    sums in place of products and the maximum in place of sums.
    """
    largest = -np.inf
    power = weights
    for length in range(1, len(weights) + 1):
        largest = max(largest, float(np.diag(power).max()) / length)
        power = (power[:, :, None] + weights[None, :, :]).max(axis=1)
    return largest
