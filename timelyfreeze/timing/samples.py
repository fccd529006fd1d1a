"""Action times collected while monitoring, and how those of all ranks become one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from timelyfreeze.schedule import Action, ScheduleOrder, build_order, parse_action

Times = Mapping[Action, Sequence[float]]


@dataclass(frozen=True)
class BatchRecord:
    """What the clocks of one rank saw of one pipeline batch.

    Attributes:
        durations_ms: Milliseconds of each action, float64, in the order of execution.
        span_ms: Milliseconds from the start of the rank's first action to the end of its last,
            waiting included.
        intervals_ms: When each action began and ended, in milliseconds since the rank's first
            action began; longer than its duration where the rank went without a core.
    """

    durations_ms: dict[Action, float]
    span_ms: float
    intervals_ms: dict[Action, tuple[float, float]] = field(default_factory=dict)


@dataclass
class Samples:
    """One rank's action times in one half of the monitoring phase; cold batches are kept apart.

    Each batch is a mapping from action to milliseconds in the order of execution.

    Attributes:
        warm: Durations of the batches that count.
        cold: Durations of the first batches after a change of phase.
        spans_ms: From the start of the rank's first action to the end of its last, of warm batches.
    """

    warm: list[dict[Action, float]] = field(default_factory=list)
    cold: list[dict[Action, float]] = field(default_factory=list)
    spans_ms: list[float] = field(default_factory=list)

    def add(self, record: BatchRecord, *, is_cold: bool) -> None:
        """Take note of one batch; cold ones are the first after a change of phase."""
        (self.cold if is_cold else self.warm).append(record.durations_ms)
        if not is_cold:
            self.spans_ms.append(record.span_ms)

    def keep_last(self, n: int) -> None:
        """Forget all but the last ``n`` warm batches."""
        del self.warm[:-n], self.spans_ms[:-n]

    def per_action(self) -> dict[Action, list[float]]:
        """Sort the times by action, milliseconds, oldest first.

        Those of the warm batches; of the cold ones where a stop left no others.
        """
        return _by_action(self.warm or self.cold)

    def to_plain(self) -> dict[str, Any]:
        """Return the samples as plain data for a checkpoint."""
        return {
            "warm": [_plain(times) for times in self.warm],
            "cold": [_plain(times) for times in self.cold],
            "spans_ms": list(self.spans_ms),
        }


def samples_from_plain(plain: Mapping[str, Any]) -> Samples:
    """Return what ``to_plain`` was called on."""
    return Samples(
        warm=[_from_plain(times) for times in plain["warm"]],
        cold=[_from_plain(times) for times in plain["cold"]],
        spans_ms=list(plain["spans_ms"]),
    )


def slowest_replica(ranks: Sequence[Times]) -> dict[Action, Sequence[float]]:
    """Merge the times of all ranks, ms; of replicas the one whose median is highest counts.

    Replicas meet at every gradient reduction, so the slowest one decides when a step ends.
    """
    merged: dict[Action, Sequence[float]] = {}
    for times in ranks:
        for action, values in times.items():
            if action not in merged or np.median(values) > np.median(merged[action]):
                merged[action] = values
    return merged


def executed_order(ranks: Sequence[Times], declared: ScheduleOrder) -> ScheduleOrder:
    """Return the order that was really executed, ranks in the places they have in ``declared``.

    Args:
        ranks: Times of each process, actions in the order of execution; replicas may repeat.
        declared: What the schedule says it runs.

    Raises:
        ValueError: If what was executed is no complete pipeline (as ``ScheduleError``).
    """
    by_rank: dict[int, list[Action]] = {}
    for times in ranks:
        held: dict[int, list[Action]] = {}  # of several ranks where a pipeline is emulated
        for action in times:
            held.setdefault(declared.stage_to_rank[action.stage], []).append(action)
        for rank, actions in held.items():
            by_rank.setdefault(rank, actions)
    return build_order([by_rank.get(rank, []) for rank in range(declared.n_ranks)])


def median_of_each(batches: Sequence[Mapping[Action, float]]) -> dict[Action, float]:
    """Return each action's median time over ``batches``, milliseconds."""
    return {action: float(np.median(values)) for action, values in _by_action(batches).items()}


def _by_action(batches: Sequence[Mapping[Action, float]]) -> dict[Action, list[float]]:
    together: dict[Action, list[float]] = {}
    for times_ms in batches:
        for action, time_ms in times_ms.items():
            together.setdefault(action, []).append(time_ms)
    return together


def _plain(durations_ms: Mapping[Action, float]) -> dict[str, float]:
    return {str(action): duration_ms for action, duration_ms in durations_ms.items()}


def _from_plain(times: Mapping[str, float]) -> dict[Action, float]:
    return {parse_action(text): duration_ms for text, duration_ms in times.items()}
