"""A pipeline whose ranks take turns on one device: what runs after what, and when it would end.

With all stages in one process and no communication, each action runs and is timed alone. The merged
order says in which sequence they run here; the virtual clock says when each would have run if every
rank had had a device of its own. Notation: A actions, N ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from timelyfreeze.schedule import (
    Action,
    ActionKind,
    PipelineDag,
    ScheduleOrder,
    build_dag,
    start_times,
)

# Forward, input gradient and weight gradient are one matrix product each for every weight.
_UNITS = {
    ActionKind.FORWARD: 1.0,
    ActionKind.FULL_BACKWARD: 2.0,
    ActionKind.INPUT_BACKWARD: 1.0,
    ActionKind.WEIGHT_BACKWARD: 1.0,
}


def merge_ranks(order: ScheduleOrder) -> tuple[Action, ...]:
    """Put the actions of all ranks into one sequence in which they can run one at a time.

    Actions come in the order in which they would start if forward, input gradient and weight
    gradient took equally long, so activations of about as many microbatches are alive at once as in
    the pipeline itself. No action takes no time, so none starts before, or as, one that it needs.
    """
    dag = build_dag(order)
    start = start_times(dag, [_UNITS[action.kind] for action in dag.actions])
    # Stable: actions that start together come rank by rank.
    return tuple(dag.actions[i] for i in np.argsort(start, kind="stable").tolist())


@dataclass(frozen=True)
class VirtualBatch:
    """One batch as the ranks' own devices would have run it."""

    batch_ms: float  # from the start of the first action to the end of the last, milliseconds
    spans_ms: tuple[float, ...]  # the same for each of the N ranks alone, waiting included
    # when each action began and ended, since the first one began
    intervals_ms: dict[Action, tuple[float, float]]


def virtual_batch(dag: PipelineDag, durations_ms: Mapping[Action, float]) -> VirtualBatch:
    """Play a batch through on a clock that all ranks share, each action lasting as measured, ms.

    An action starts once all that it waits for has ended; passing results on takes no time.
    """
    missing = [str(action) for action in dag.actions if action not in durations_ms]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(dag.actions)} actions of the batch have no time: "
            f"{', '.join(missing[:4])} ..."
        )
    durations = np.array([durations_ms[action] for action in dag.actions], dtype=np.float64)
    start = start_times(dag, durations)
    end = start + durations
    spans = []
    for rank in range(int(dag.ranks.max()) + 1):
        mine = dag.ranks == rank
        spans.append(float(end[mine].max() - start[mine].min()))
    pairs = zip(start.tolist(), end.tolist(), strict=True)
    intervals = dict(zip(dag.actions, pairs, strict=True))
    return VirtualBatch(float(end.max()), tuple(spans), intervals)
