"""What this process has measured for a plan, kept until there is one and in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from timelyfreeze.planning import RankTimes
from timelyfreeze.timing import UNFROZEN, Monitoring, PatternTimes, Samples


class Measured:
    """Times of actions, of messages, and beside batches.

    Attributes:
        times: Of the actions of monitoring, by what was frozen.
        warmup: Of the batches before it; a resumed run has those since, for they plan nothing.
        transfers_ms: Of messages, by sending and receiving rank, as far as this process knows.
        outside_ms: What each timed step took besides its batches, for each of them.
        energies: What the last exact gradients had inside of subspaces, and in all.
    """

    def __init__(self) -> None:
        self.times = Monitoring()
        self.warmup = Samples()
        self.transfers_ms: Mapping[tuple[int, int], float] = {}
        self.outside_ms: list[float] = []
        self.energies = (0.0, 0.0)

    def rank_times(self) -> RankTimes:
        """Return all of it, to be sent to whoever solves."""
        warmup = PatternTimes(UNFROZEN, self.warmup.per_action(), tuple(self.warmup.spans_ms))
        outside_ms = tuple(self.outside_ms)
        return RankTimes(self.times.times(), self.transfers_ms, outside_ms, warmup, self.energies)

    def forget(self) -> None:
        """Forget the times of batches: there is a plan, or there will be none."""
        self.times.clear()
        self.warmup = Samples()

    def to_plain(self) -> dict[str, Any]:
        """Return all of it as plain data for a checkpoint."""
        return {
            "samples": self.times.to_plain(),
            "p2p_latency_ms": [[*link, ms] for link, ms in self.transfers_ms.items()],
            "outside_ms": list(self.outside_ms),
            "energies": list(self.energies),
        }

    def load_plain(self, plain: Mapping[str, Any]) -> None:
        """Restore what :meth:`to_plain` returned; samples of other phases are left to others."""
        self.times.load_plain(plain["samples"])
        self.transfers_ms = {(a, b): ms for a, b, ms in plain["p2p_latency_ms"]}
        self.outside_ms = list(plain["outside_ms"])
        inside, whole = plain["energies"]
        self.energies = (inside, whole)
