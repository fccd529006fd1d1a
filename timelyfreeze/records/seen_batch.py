"""The timeline of a batch, from its ranks' measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.records.timeline import MEASURED, Timeline, timeline_of
from timelyfreeze.schedule import (
    Action,
    PipelineDag,
    ScheduleOrder,
    build_dag,
    build_order,
    edge_delays,
)
from timelyfreeze.settings import Phase
from timelyfreeze.timing import Intervals, clock_offsets, min_distances


@dataclass(frozen=True)
class SeenBatch:
    """Measured intervals of a pass on a process."""

    intervals_ms: Intervals  # when each of its actions began and ended, by its own clock
    fractions: Mapping[Action, float]  # frozen ones of elements, where weight gradients are due


def measured_timeline(
    declared: ScheduleOrder,
    processes: Sequence[SeenBatch],
    phase: Phase,
    *,
    step: int | None = None,
    p2p_latency_ms: Mapping[tuple[int, int], float] | None = None,
    entry_stage: int | None = None,
) -> Timeline:
    """Build a batch's timeline from the measurements of all processes.

    A ValueError says if the measurements make no batch. Processes share no clock. Clocks are
    shifted so that no action begins before its inputs arrive; messages in both directions leave a
    range of shifts, and the middle is taken (``clock_offsets``). Idle times are measured by rank;
    lanes are placed to within half the round trip beyond ``p2p_latency_ms``. An emulation's single
    process has a single clock.

    ``declared`` maps stages to ranks; the executed order replaces its order. Of data-parallel
    replicas the first with a stage counts. Actions in front of ``entry_stage`` take no time.
    """
    seen = _first_to_see(processes)
    sent = _without_messages_before(build_dag(_order_that_ran(declared, seen)), entry_stage or 0)
    delays_ms = edge_delays(sent, p2p_latency_ms or {})
    clocks = [process.intervals_ms for process in seen]
    distances = min_distances(sent, clocks, delays_ms)
    # Who ran nothing has sent no message, so there is no saying what his clock shows.
    ran = [any(a.stage >= (entry_stage or 0) for a in clock) for clock in clocks]
    offsets = np.zeros(len(clocks))
    offsets[ran] = clock_offsets(distances[np.ix_(ran, ran)])
    times = {
        action: (offset + start, offset + end)
        for offset, clock in zip(offsets.tolist(), clocks, strict=True)
        for action, (start, end) in clock.items()
    }
    intervals = np.array([times[action] for action in sent.actions])
    intervals -= intervals[sent.stages >= (entry_stage or 0)].min()
    _pass_by(sent, intervals, entry_stage or 0)
    fractions = {
        action: fraction for process in seen for action, fraction in process.fractions.items()
    }
    ratios = np.array([fractions.get(action, 0.0) for action in sent.actions])
    start, end = intervals.T
    return timeline_of(MEASURED, phase, sent, start, end, ratios, delays_ms, step, entry_stage)


def _first_to_see(processes: Sequence[SeenBatch]) -> list[SeenBatch]:
    """Return the processes with measurements of their own."""
    seen: list[SeenBatch] = []
    known: set[Action] = set()
    for process in processes:
        if process.intervals_ms and not known.issuperset(process.intervals_ms):
            seen.append(process)
            known.update(process.intervals_ms)
    return seen


def _order_that_ran(declared: ScheduleOrder, seen: Sequence[SeenBatch]) -> ScheduleOrder:
    rows: list[list[Action]] = [[] for _ in declared.ranks]
    for process in seen:
        # Stable, so that actions that take no time stay in the order of execution.
        for action in sorted(process.intervals_ms, key=lambda a: process.intervals_ms[a]):
            if action.stage >= declared.n_stages:
                raise ValueError(
                    f"action {action} was seen, and the schedule has {declared.n_stages} stages"
                )
            rows[declared.stage_to_rank[action.stage]].append(action)
    return build_order(rows)


def _without_messages_before(dag: PipelineDag, stage: int) -> PipelineDag:
    """Return the graph without edges between ranks in front of ``stage``."""
    is_between = dag.ranks[dag.edges[:, 0]] != dag.ranks[dag.edges[:, 1]]
    return replace(
        dag, edges=dag.edges[~(is_between & (dag.stages[dag.edges] < stage).any(axis=1))]
    )


def _pass_by(dag: PipelineDag, intervals: NDArray[np.float64], stage: int) -> None:
    """Give actions in front of ``stage`` no time, at their predecessor's end on the rank."""
    now, rank = 0.0, -1
    for i, (at_stage, at_rank) in enumerate(zip(dag.stages, dag.ranks, strict=True)):
        now, rank = (now if at_rank == rank else 0.0), at_rank
        if at_stage < stage:
            intervals[i] = now
        now = intervals[i, 1]
