"""Measurements of a process that a plan is made from."""

from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from timelyfreeze.planning import RankTimes
from timelyfreeze.timing import UNFROZEN, Energies, Monitoring, PatternTimes, Samples


class Measured:
    """Times of actions, of messages, and beside batches."""

    def __init__(self) -> None:
        self.times = Monitoring()  # of the actions of monitoring, by what was frozen
        # of the batches before it; a resumed run has those since, for they plan nothing
        self.warmup = Samples()
        # of messages, by sending and receiving rank, as far as this process knows
        self.transfers_ms: Mapping[tuple[int, int], float] = {}
        # what each timed step took besides its batches, for each of them
        self.outside_ms: list[float] = []
        self.energies = Energies()  # of the last exact gradients in subspaces

    def rank_times(self) -> RankTimes:
        """Return all of it, to be sent to whoever solves."""
        warmup = PatternTimes(UNFROZEN, self.warmup.per_action(), tuple(self.warmup.spans_ms))
        outside_ms = tuple(self.outside_ms)
        times = self.times.times()
        return RankTimes(times, self.transfers_ms, outside_ms, warmup, self.energies)

    def to_plain(self) -> dict[str, Any]:
        """Return all of it as plain data for a checkpoint."""
        return {
            "samples": self.times.to_plain(),
            "p2p_latency_ms": [[*link, ms] for link, ms in self.transfers_ms.items()],
            "outside_ms": list(self.outside_ms),
            "energies": list(astuple(self.energies)),
        }

    def load_plain(self, plain: Mapping[str, Any]) -> None:
        """Restore what :meth:`to_plain` returned; samples of other phases are left to others."""
        self.times.load_plain(plain["samples"])
        self.transfers_ms = {(a, b): ms for a, b, ms in plain["p2p_latency_ms"]}
        self.outside_ms = list(plain["outside_ms"])
        self.energies = Energies(*plain["energies"])
