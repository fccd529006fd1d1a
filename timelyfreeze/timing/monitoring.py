"""Freezing of batches in monitoring, and their times.

Both bounds of a backward are measured with all of a stage frozen and with nothing frozen. The paper
uses half of the batches for either; the second half changes no weights. Mixed monitoring does both
in every batch: some backwards are frozen whole, the others not at all, and the next batch does the
opposite. Every step then learns, tensors from about half of the microbatches.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from timelyfreeze.files import read_dataclass, to_plain
from timelyfreeze.schedule import Action, ScheduleOrder, build_order
from timelyfreeze.settings import Phase, PhaseSchedule

Times = Mapping[Action, Sequence[float]]
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class BatchRecord:
    """Clock readings of a rank in a pipeline batch."""

    # milliseconds of each action, float64, in the order of execution
    durations_ms: dict[Action, float]
    # milliseconds from the start of the rank's first action to the end of its last, waiting
    # included
    span_ms: float
    # when each action began and ended, in milliseconds since the rank's first action began; longer
    # than its duration where the rank went without a core
    intervals_ms: dict[Action, tuple[float, float]] = field(default_factory=dict)


@dataclass
class Samples:
    """A rank's action times in a half of monitoring; cold batches are separate.

    A batch is a mapping from action to milliseconds in the order of execution.
    """

    # durations of the batches that count
    warm: list[dict[Action, float]] = field(default_factory=list)
    # durations of the first batches after a change of phase
    cold: list[dict[Action, float]] = field(default_factory=list)
    # from the start of the rank's first action to the end of its last, of warm batches
    spans_ms: list[float] = field(default_factory=list)

    def add(self, record: BatchRecord, *, is_cold: bool) -> None:
        """Add a batch; cold: the first after a change of phase."""
        (self.cold if is_cold else self.warm).append(record.durations_ms)
        if not is_cold:
            self.spans_ms.append(record.span_ms)

    def keep_last(self, n: int) -> None:
        """Forget all but the last ``n`` warm batches."""
        del self.warm[:-n], self.spans_ms[:-n]

    def per_action(self) -> dict[Action, list[float]]:
        """Sort the times by action, milliseconds, oldest first.

        Times of warm batches; of cold batches where a stop left no others.
        """
        return _by_action(self.warm or self.cold)


def slowest_replica(ranks: Sequence[Times]) -> dict[Action, Sequence[float]]:
    """Merge the times of all ranks, ms; the replica with the highest median counts.

    Replicas meet at every gradient reduction, so the slowest decides the end of a step.
    """
    return {action: max(each, key=np.median) for action, each in _by_action(ranks).items()}


def executed_order(ranks: Sequence[Times], declared: ScheduleOrder) -> ScheduleOrder:
    """Return the executed order, ranks in their places in ``declared``."""
    by_rank: dict[int, list[Action]] = {}
    for times in ranks:
        held: dict[int, list[Action]] = {}  # of several ranks where a pipeline is emulated
        for action in times:
            held.setdefault(declared.stage_to_rank[action.stage], []).append(action)
        by_rank = held | by_rank
    return build_order([by_rank.get(rank, []) for rank in range(declared.n_ranks)])


def median_of_each(batches: Sequence[Mapping[Action, float]]) -> dict[Action, float]:
    """Return the median time of each action over ``batches``, milliseconds."""
    return {action: float(np.median(values)) for action, values in _by_action(batches).items()}


def _by_action(several: Sequence[Mapping[Action, _Value]]) -> dict[Action, list[_Value]]:
    together: dict[Action, list[_Value]] = {}
    for each in several:
        for action, value in each.items():
            together.setdefault(action, []).append(value)
    return together


# A stage's first live backward of a batch writes gradients that the later ones add to, which takes
# longer. Blocks of several sizes take turns, so that it is not always the same microbatch.
_BLOCKS = (1, 2, 4)


@dataclass(frozen=True)
class Pattern:
    """The backwards of a batch frozen whole; the others are live."""

    name: str  # as it stands in checkpoints
    block: int  # number of consecutive microbatches of a stage that are treated alike; 0 for all
    side: int  # 0, or 1 for the opposite

    def freezes(self, action: Action) -> bool:
        """Return whether ``action`` is frozen; a forward counts with its backward.

        Neighbouring stages differ, so with two stages or more every batch has live stages.
        """
        if self.block == 0:
            return self.side == 1
        return (action.microbatch // self.block + action.stage + self.side) % 2 == 1


UNFROZEN = Pattern(Phase.UPPER_BOUND.value, 0, 0)
FROZEN = Pattern(Phase.LOWER_BOUND.value, 0, 1)
MIXED_PATTERNS = tuple(
    Pattern(f"{Phase.MIXED.value}_{block}_{side}", block, side)
    for block in _BLOCKS
    for side in (0, 1)
)
PATTERNS: Mapping[str, Pattern] = {p.name: p for p in (UNFROZEN, FROZEN, *MIXED_PATTERNS)}


def pattern_of(
    phases: PhaseSchedule, step: int, batch_index: int, n_microbatches: int
) -> Pattern | None:
    """Return a batch's pattern in monitoring; None in a step of another phase.

    In mixed monitoring, opposite patterns follow each other: in the batches of a step, and in the
    same batch of two steps. All stages have live and frozen microbatches, so that every tensor
    learns in every step; a single microbatch cannot be both, and is live in every other stage.
    Steps count from 1, the batches of a step from 0.
    """
    phase = phases.phase(step)
    if phase is Phase.MIXED:
        number = step - phases.last_warmup_step - 1 + batch_index
        blocks = [block for block in _BLOCKS if block < n_microbatches] or _BLOCKS[:1]
        patterns = [pattern for pattern in MIXED_PATTERNS if pattern.block in blocks]
        return patterns[number % len(patterns)]
    return {Phase.UPPER_BOUND: UNFROZEN, Phase.LOWER_BOUND: FROZEN}.get(phase)


@dataclass(frozen=True)
class PatternTimes:
    """Measurements of a process in the batches of a pattern; milliseconds."""

    pattern: Pattern  # what they froze
    times: Times  # durations of each action, actions in the order of execution
    spans_ms: tuple[float, ...] = ()  # start of the first action to end of the last, of each batch

    def without(self, batches: Collection[int]) -> "PatternTimes":
        """Return the times without some batches, by their number from 0."""

        def kept(values: Sequence[float]) -> list[float]:
            return [value for number, value in enumerate(values) if number not in batches]

        times = {action: kept(values) for action, values in self.times.items()}
        times = {action: values for action, values in times.items() if values}
        return replace(self, times=times, spans_ms=tuple(kept(self.spans_ms)))


class Monitoring:
    """Times of this rank's actions by pattern, until there is a plan."""

    def __init__(self) -> None:
        self._samples: dict[str, Samples] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there are no measurements."""
        return not self._samples

    def add(self, pattern: Pattern, record: BatchRecord, *, is_cold: bool) -> None:
        """Add a batch with ``pattern``; cold: the first after a change of phase."""
        self._samples.setdefault(pattern.name, Samples()).add(record, is_cold=is_cold)

    def times(self) -> tuple[PatternTimes, ...]:
        """Return the measurements, an entry per seen pattern.

        Cold batches count only without warm batches of any mixed pattern.
        """
        mixed_is_warm = any(s.warm for name, s in self._samples.items() if PATTERNS[name].block)
        return tuple(
            PatternTimes(PATTERNS[name], samples.per_action(), tuple(samples.spans_ms))
            for name, samples in self._samples.items()
            if samples.warm or not (PATTERNS[name].block and mixed_is_warm)
        )

    def clear(self) -> None:
        """Forget all times."""
        self._samples = {}

    def to_plain(self) -> dict[str, Any]:
        """Return the times as plain data for a checkpoint, by the name of the pattern."""
        return dict(to_plain(self._samples))

    def load_plain(self, plain: Mapping[str, Any]) -> None:
        """Restore the state of :meth:`to_plain`; unknown names are left to others."""
        self._samples = {
            name: read_dataclass(Samples, entry, name)
            for name, entry in plain.items()
            if name in PATTERNS
        }


def halves(times: tuple[PatternTimes, ...]) -> tuple[Times, Times]:
    """Sort a process's times of actions into unfrozen and frozen, milliseconds.

    Actions are in the order of execution as far as the patterns show it.
    """
    unfrozen: dict[Action, list[float]] = {}
    frozen: dict[Action, list[float]] = {}
    for entry in times:
        for action, values in entry.times.items():
            half = frozen if entry.pattern.freezes(action) else unfrozen
            half.setdefault(action, []).extend(values)
    return unfrozen, frozen
