"""The controller of an emulated pipeline, and its state in a checkpoint: as ranks would save it.

A controller that holds all ranks has one state; a checkpoint has one for each rank. Both directions
are here, so that a run may go on in the other form: emulated on one device, or on a device for each
rank. States are the plain data of ``FreezeController``.

Without communication each action runs and is timed alone. The merged order says in which sequence
they run here; the virtual clock says when each would have run if every rank had had a device of its
own. Notation: A actions, N ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from timelyfreeze.control.state import (
    FreezingState,
    Kind,
    Rules,
    added,
    combined,
    merge_times,
    state_of,
)
from timelyfreeze.files import read_dataclass, to_plain
from timelyfreeze.runtime import ActionRecorder, Clock
from timelyfreeze.schedule import (
    Action,
    ActionKind,
    PipelineDag,
    ScheduleOrder,
    build_dag,
    stages_of_ranks,
    start_times,
)
from timelyfreeze.timing import BatchRecord, Samples

_Key = TypeVar("_Key")
_Time = TypeVar("_Time")

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


def virtual_batch(dag: PipelineDag, durations_ms: dict[Action, float]) -> BatchRecord:
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
    pairs = zip(start.tolist(), end.tolist(), strict=True)
    return BatchRecord(durations_ms, float(end.max()), dict(zip(dag.actions, pairs, strict=True)))


def rank_spans(order: ScheduleOrder, batch: BatchRecord) -> list[float]:
    """Return the time from each rank's first action to its last, waiting included, ms."""
    spans = []
    for rank in range(order.n_ranks):
        start, end = zip(*_of_rank(batch.intervals_ms, order, rank).values(), strict=True)
        spans.append(max(end) - min(start))
    return spans


def split_state(state: Mapping[str, Any], order: ScheduleOrder) -> list[dict[str, Any]]:
    """Return what each rank would have saved, given the state of a controller that holds all ranks.

    Action times go to the rank that holds the stage, and every rank's span of a batch is what the
    virtual clock says, counts and gradient energies of a stage too. Sums of the average freeze
    ratio are added over ranks when read, so the first rank gets them whole. Everything else is the
    same on all ranks. ``merge_states`` undoes it.
    """
    samples = {
        phase: _split_samples(order, read_dataclass(Samples, times, phase))
        for phase, times in state.get("planner", {"samples": {}})["samples"].items()
    }

    def rules(rank: int) -> Rules:
        of_rank = {phase: to_plain(ranks[rank]) for phase, ranks in samples.items()}
        is_held = [holder == rank for holder in order.stage_to_rank]
        return {
            Kind.SUMMED: lambda found: found[0] if rank == 0 else [0, 0],
            Kind.BY_STAGE: lambda found: {s: v for s, v in found[0].items() if is_held[int(s)]},
            Kind.TIMES: lambda found: {**found[0], "samples": of_rank},
        }

    return [combined([state], rules(rank)) for rank in range(order.n_ranks)]


def merge_states(parts: Sequence[Mapping[str, Any]], order: ScheduleOrder) -> dict[str, Any]:
    """Return the state of a controller that holds all ranks, of their states in order.

    Times of all ranks are put together batch by batch; a batch lasts what the virtual clock says,
    whether messages were measured or not.
    """
    rules: Rules = {
        Kind.SUMMED: added,
        Kind.BY_STAGE: _union,
        # A rank timed the links to ranks of a higher number only.
        Kind.TIMES: lambda found: merge_times(found, partial(_merge_samples, order), _union),
    }
    return combined(parts, rules)


def _union(found: Sequence[Mapping[_Key, _Time]]) -> dict[_Key, _Time]:
    return {key: value for each in found for key, value in each.items()}


def _split_samples(order: ScheduleOrder, samples: Samples) -> list[Samples]:
    dag = build_dag(order)
    spans_ms = [rank_spans(order, virtual_batch(dag, times)) for times in samples.warm]
    return [
        Samples(
            warm=[_of_rank(times, order, rank) for times in samples.warm],
            cold=[_of_rank(times, order, rank) for times in samples.cold],
            spans_ms=[spans[rank] for spans in spans_ms],
        )
        for rank in range(order.n_ranks)
    ]


def _of_rank(times: Mapping[Action, _Time], order: ScheduleOrder, rank: int) -> dict[Action, _Time]:
    holders = order.stage_to_rank
    return {action: time for action, time in times.items() if holders[action.stage] == rank}


def _merge_samples(order: ScheduleOrder, ranks: Sequence[Samples]) -> Samples:
    dag = build_dag(order)
    warm, cold = (
        [{a: ms for times in parts for a, ms in times.items()} for parts in zip(*half, strict=True)]
        for half in zip(*((each.warm, each.cold) for each in ranks), strict=True)
    )
    return Samples(warm, cold, [virtual_batch(dag, times).span_ms for times in warm])


class EmulatedState(FreezingState):
    """Saves a state for each rank and restores those of all, so that runs go on in either form."""

    def of_processes(self, state: Mapping[str, Any]) -> Mapping[int, Mapping[str, Any]]:
        """Return {rank: what it would have saved}."""
        return dict(enumerate(split_state(state, self.declared)))

    def own(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the state of all ranks together."""
        ranks = stages_of_ranks(self.declared.stage_to_rank)
        ranks_states = [state_of(states, stages, i, len(ranks)) for i, stages in enumerate(ranks)]
        return merge_states(ranks_states, self.declared)


@dataclass(frozen=True)
class EmulatedBatch:
    """What one batch took; milliseconds."""

    virtual_ms: float  # with a device for each rank, by the virtual clock
    real_ms: float  # here, one action after the other


class EmulatedRecorder(ActionRecorder):
    """Times actions that run here one by one; spans are virtual, real ones are kept beside."""

    def __init__(self, clock: Clock, order: ScheduleOrder) -> None:
        super().__init__(clock)
        self._dag = build_dag(order)
        self._batches: list[EmulatedBatch] = []

    def drain(self) -> list[BatchRecord]:
        """Hand out what was recorded, as :meth:`ActionRecorder.drain`, with virtual spans."""
        records = []
        for record in super().drain():
            virtual = virtual_batch(self._dag, record.durations_ms)
            self._batches.append(EmulatedBatch(virtual.span_ms, record.span_ms))
            records.append(virtual)
        return records

    def take_batches(self) -> list[EmulatedBatch]:
        """Return what the batches drained since the last call took, oldest first."""
        batches, self._batches = self._batches, []
        return batches
