"""Durations of a stage's actions and of messages, for any schedule and number of microbatches.

Bounds belong to one schedule: they name its actions. A question such as "what if the schedule were
another" needs times of stages. Times of a full backward and of a split backward follow from each
other, if only one was measured: the input half I takes as long as a backward with everything
frozen, and the weight half W as long as freezing can save. The first stage sends no gradient, so
its I takes nothing and its W does the whole backward.

Microbatches and messages keep their measured size; their number and links change.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Annotated

import numpy as np

from timelyfreeze.files import MOST, WRITTEN, Within
from timelyfreeze.schedule import Action, ActionKind, PipelineDag
from timelyfreeze.timing import DurationBounds, simulate_batch, with_messages

Pair = tuple[float, float]
Overhead = Annotated[float, Within(-MOST, MOST), WRITTEN]  # may be below 0: a difference of times


@dataclass(frozen=True)
class StageTimes:
    """Milliseconds of a stage's actions for a microbatch.

    Also the overhead of a part of a stage, such as a layer, and differences of such; sums need not
    be possible times (``errors``).
    """

    forward_ms: Overhead = 0.0  # F
    backward_ms: Overhead = 0.0  # B with nothing frozen
    frozen_backward_ms: Overhead = 0.0  # B with everything frozen
    input_ms: Overhead = 0.0  # I
    weight_ms: Overhead = 0.0  # W with nothing frozen
    frozen_weight_ms: Overhead = 0.0  # W with everything frozen

    def plus(self, other: StageTimes, times: float = 1.0) -> StageTimes:
        """Return the sum of these times and ``times`` times ``other``."""
        return StageTimes(
            *(a + times * b for a, b in zip(astuple(self), astuple(other), strict=True))
        )

    def over(self, divisor: float) -> StageTimes:
        """Return these times divided by ``divisor``."""
        return StageTimes(*(a / divisor for a in astuple(self)))

    def bounds_of(self, kind: ActionKind) -> Pair:
        """Return the (shortest, longest) duration of an action of ``kind``."""
        return {
            ActionKind.FORWARD: (self.forward_ms, self.forward_ms),
            ActionKind.FULL_BACKWARD: (self.frozen_backward_ms, self.backward_ms),
            ActionKind.INPUT_BACKWARD: (self.input_ms, self.input_ms),
            ActionKind.WEIGHT_BACKWARD: (self.frozen_weight_ms, self.weight_ms),
        }[kind]

    def pinned(self) -> StageTimes:
        """Return the times with backwards no faster frozen taken as unfrozen.

        As in ``timing.bounds_from_samples``. W, a small difference of larger times, may even come
        out below 0, and is then 0.
        """
        weight_ms = max(self.weight_ms, 0.0)
        return replace(
            self,
            frozen_backward_ms=min(self.frozen_backward_ms, self.backward_ms),
            weight_ms=weight_ms,
            frozen_weight_ms=min(max(self.frozen_weight_ms, 0.0), weight_ms),
        )

    def errors(self) -> list[str]:
        """Yield impossible times of a stage."""
        found = [
            f"{field.name} would be {value:.4g}"
            for field, value in zip(fields(self), astuple(self), strict=True)
            if not 0.0 <= value < float("inf")
        ]
        for kind in (ActionKind.FULL_BACKWARD, ActionKind.WEIGHT_BACKWARD):
            frozen_ms, unfrozen_ms = self.bounds_of(kind)
            if frozen_ms > unfrozen_ms:
                times = f"{frozen_ms:.4g} ms frozen and {unfrozen_ms:.4g} ms unfrozen"
                found.append(f"{kind.value} would take {times}")
        return found


def complete_times(pairs: Mapping[ActionKind, Pair], *, is_first: bool) -> StageTimes:
    """Fill in missing (shortest, longest) durations by kind: of B, or of I and W."""
    forward_ms, _ = pairs[ActionKind.FORWARD]
    if ActionKind.WEIGHT_BACKWARD not in pairs:
        low_ms, high_ms = pairs[ActionKind.FULL_BACKWARD]
        input_ms = 0.0 if is_first else low_ms
        frozen_weight_ms, weight_ms = low_ms - input_ms, high_ms - input_ms
    else:
        input_ms, _ = pairs[ActionKind.INPUT_BACKWARD]
        frozen_weight_ms, weight_ms = pairs[ActionKind.WEIGHT_BACKWARD]
        both = input_ms + frozen_weight_ms, input_ms + weight_ms
        low_ms, high_ms = pairs.get(ActionKind.FULL_BACKWARD, both)
    return StageTimes(forward_ms, high_ms, low_ms, input_ms, weight_ms, frozen_weight_ms)


def median_pairs(bounds: Mapping[Action, Pair], stage: int) -> dict[ActionKind, Pair]:
    """Return a stage's (shortest, longest) durations by kind, medians over its microbatches."""
    by_kind: dict[ActionKind, list[Pair]] = {}
    for action, pair in bounds.items():
        if action.stage == stage:
            by_kind.setdefault(action.kind, []).append(pair)
    median = statistics.median
    return {
        kind: (median(low for low, _ in pairs), median(high for _, high in pairs))
        for kind, pairs in by_kind.items()
    }


@dataclass(frozen=True)
class Links:
    """Overhead and latency of messages."""

    # Overhead, part of every action that works on what another rank has sent.
    p2p_overhead_ms: float = 0.0
    # By sending and receiving rank, as measured. A link that was not measured has the median of
    # those that were.
    p2p_latency_ms: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def over(self, dag: PipelineDag) -> dict[tuple[int, int], float]:
        """Return the times of a pipeline's links, by sending and receiving rank."""
        if not self.p2p_latency_ms:
            return {}
        others_ms = statistics.median(self.p2p_latency_ms.values())
        links = {(a, b) for a, b in dag.ranks[dag.edges].tolist() if a != b}
        return {link: self.p2p_latency_ms.get(link, others_ms) for link in sorted(links)}


FREE = Links()


def bounds_from_times(
    dag: PipelineDag, stages: Sequence[StageTimes], links: Links = FREE
) -> DurationBounds:
    """Give the actions of a schedule the times of their stage, and messages the times of links."""
    pairs = np.array(
        [stages[action.stage].bounds_of(action.kind) for action in dag.actions], dtype=np.float64
    )
    bounds = DurationBounds(pairs[:, 0], pairs[:, 1], p2p_latency_ms=links.over(dag))
    return with_messages(dag, bounds, links.p2p_overhead_ms)


def unfrozen_batch_ms(
    dag: PipelineDag,
    stages: Sequence[StageTimes],
    n_processors: float | None = None,
    links: Links = FREE,
) -> float:
    """Return the time of a batch of unfrozen actions."""
    bounds = bounds_from_times(dag, stages, links)
    return simulate_batch(dag, bounds.max_ms, n_processors, bounds.delays_ms(dag))[1]
