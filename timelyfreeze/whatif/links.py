"""What messages between ranks cost, carried over from the measured pipeline to any other.

A microbatch stays as large as it was measured, and with it every message. What changes is how many
there are and over which links they go.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.schedule import PipelineDag, edge_delays
from timelyfreeze.timing import DurationBounds, receiving, with_messages


@dataclass(frozen=True)
class Links:
    """Overhead of a message, and what it takes on its way.

    Attributes:
        message_ms: Overhead, part of every action that works on what another rank has sent.
        transfers_ms: By sending and receiving rank, as measured. A link that was not measured takes
            as long as the one in the middle of those that were.
    """

    message_ms: float = 0.0
    transfers_ms: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def lead_ms(self, dag: PipelineDag) -> NDArray[np.float64]:
        """Return the part of each action that is the overhead of its message, shape [A]."""
        return np.where(receiving(dag), np.float64(self.message_ms), 0.0)

    def delays_ms(self, dag: PipelineDag) -> NDArray[np.float64]:
        """Return what the message along each edge takes on its way, shape [E]."""
        return edge_delays(dag, self.over(dag))

    def over(self, dag: PipelineDag) -> dict[tuple[int, int], float]:
        """Return what the links of a pipeline take, by sending and receiving rank."""
        if not self.transfers_ms:
            return {}
        others_ms = statistics.median(self.transfers_ms.values())
        links = {(a, b) for a, b in dag.ranks[dag.edges].tolist() if a != b}
        return {link: self.transfers_ms.get(link, others_ms) for link in sorted(links)}

    def added_to(self, dag: PipelineDag, bounds: DurationBounds) -> DurationBounds:
        """Return ``bounds`` that had no messages with these."""
        with_overhead = with_messages(dag, bounds, self.message_ms)
        return replace(with_overhead, transfers_ms=self.over(dag))
