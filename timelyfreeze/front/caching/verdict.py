"""Whether reading what a frozen front puts out is faster than computing it, by measured times."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from timelyfreeze.schedule import Action, ActionKind, PipelineDag, makespan

# Batches of each kind that are timed before it is decided, and at most; the first of a kind runs
# cold.
N_COMPUTED, N_ENTERED, N_TIMED = 3, 4, 16

Times = dict[Action, float]


@dataclass
class FrontTimes:
    """What a rank has measured of its batches at one depth; milliseconds."""

    # times of each action in batches that ran through the front
    computed: list[Mapping[Action, float]] = field(default_factory=list)
    # the same in batches that began behind it
    entered: list[Mapping[Action, float]] = field(default_factory=list)
    # how long the training waited for the rows of each batch that began behind it, from the second
    # step with such batches on; empty on ranks that do not read
    read_ms: list[float] = field(default_factory=list)

    def summary(self) -> tuple[Times, Times, float | None]:
        """Return medians: of actions when computed, when entered, and of reading a batch."""
        read_ms = statistics.median(self.read_ms) if self.read_ms else None
        return _medians(self.computed[1:]), _medians(self.entered[1:]), read_ms


@dataclass(frozen=True)
class Verdict:
    """What a batch saves and costs."""

    saved_ms: float  # by how much it is shorter if it begins behind the front
    read_ms: float  # how long the training waits until its rows are read

    @property
    def pays(self) -> bool:
        """Whether reading is faster than what it saves."""
        return self.read_ms < self.saved_ms


def verdict(
    dag: PipelineDag, ranks: Sequence[tuple[Times, Times, float | None]], stage: int
) -> Verdict | None:
    """Compare a batch that is played through from measured times with and without the front.

    All but the forwards up to the first live block take the same time in both, so that a machine
    that was busy meanwhile does not count. Of replicas the slowest one's times count. ``stage`` is
    that of the first live block. None if an action was not measured.
    """
    computed = _slowest([times for times, _, _ in ranks])
    entered = _slowest([times for _, times, _ in ranks])
    read_ms = [ms for _, _, ms in ranks if ms is not None]
    if not read_ms or any(a not in computed or a not in entered for a in dag.actions):
        return None
    shorter = {
        action: ms
        for action, ms in entered.items()
        if action.kind is ActionKind.FORWARD and action.stage <= stage
    }
    saved_ms = _batch_ms(dag, computed) - _batch_ms(dag, {**computed, **shorter})
    return Verdict(saved_ms, max(read_ms))


def _slowest(ranks: Sequence[Times]) -> Times:
    slowest: dict[Action, float] = {}
    for times in ranks:
        for action, time_ms in times.items():
            slowest[action] = max(time_ms, slowest.get(action, 0.0))
    return slowest


def _batch_ms(dag: PipelineDag, times: Times) -> float:
    return makespan(dag, [times[action] for action in dag.actions])


def _medians(batches: Sequence[Mapping[Action, float]]) -> Times:
    together: dict[Action, list[float]] = {}
    for batch in batches:
        for action, time_ms in batch.items():
            together.setdefault(action, []).append(time_ms)
    return {action: statistics.median(times) for action, times in together.items()}
