"""Action times collected while monitoring, and how those of all ranks become one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from timelyfreeze.actions import Action, parse_action
from timelyfreeze.order import ScheduleOrder, build_order
from timelyfreeze.recorder import PassRecord

Times = Mapping[Action, Sequence[float]]


@dataclass
class Samples:
    """One rank's action times in one half of the monitoring phase; cold passes are kept apart.

    Each pass is a mapping from action to milliseconds in the order of execution.
    """

    warm: list[dict[Action, float]] = field(default_factory=list)
    cold: list[dict[Action, float]] = field(default_factory=list)

    def add(self, record: PassRecord, *, is_cold: bool) -> None:
        """Take note of one pass.

        Args:
            record: What the recorder saw.
            is_cold: Whether it is one of the first passes after a change of phase.
        """
        (self.cold if is_cold else self.warm).append(record.durations_ms)

    def per_action(self) -> dict[Action, list[float]]:
        """Sort the times by action.

        Returns:
            Milliseconds of each action over the warm passes, oldest first; over the cold ones
            where a stop left no others.
        """
        together: dict[Action, list[float]] = {}
        for durations_ms in self.warm or self.cold:
            for action, duration_ms in durations_ms.items():
                together.setdefault(action, []).append(duration_ms)
        return together

    def to_plain(self) -> dict[str, Any]:
        """Return the samples as plain data for a checkpoint."""
        return {
            "warm": [_plain(durations_ms) for durations_ms in self.warm],
            "cold": [_plain(durations_ms) for durations_ms in self.cold],
        }


def samples_from_plain(plain: Mapping[str, Any]) -> Samples:
    """Return what ``to_plain`` was called on."""
    return Samples(
        **{
            name: [
                {parse_action(a): ms for a, ms in durations.items()} for durations in plain[name]
            ]
            for name in ("warm", "cold")
        }
    )


def slowest_replica(ranks: Sequence[Times]) -> dict[Action, Sequence[float]]:
    """Merge the times of all ranks; of replicas that ran the same action, the slowest counts.

    Replicas meet at every gradient reduction, so the slowest one decides when a step ends.

    Args:
        ranks: Times of each process, milliseconds.

    Returns:
        For each action the times of the process whose median is highest.
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

    Returns:
        ScheduleOrder: One row per rank of ``declared``.

    Raises:
        ValueError: If what was executed is no complete pipeline (as ``ScheduleError``).
    """
    by_rank: dict[int, list[Action]] = {}
    for times in ranks:
        actions = list(times)
        if actions:
            by_rank.setdefault(declared.stage_to_rank[actions[0].stage], actions)
    return build_order([by_rank.get(rank, []) for rank in range(declared.n_ranks)])


def median_durations(records: Sequence[PassRecord]) -> dict[Action, float]:
    """Return each action's median time over ``records``, milliseconds."""
    together: dict[Action, list[float]] = {}
    for record in records:
        for action, duration_ms in record.durations_ms.items():
            together.setdefault(action, []).append(duration_ms)
    return {action: float(np.median(values)) for action, values in together.items()}


def _plain(durations_ms: Mapping[Action, float]) -> dict[str, float]:
    return {str(action): duration_ms for action, duration_ms in durations_ms.items()}
