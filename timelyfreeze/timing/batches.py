"""Batch times put together from what each rank saw of its own part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

from timelyfreeze.schedule import Action, PipelineDag, start_times
from timelyfreeze.settings import Phase
from timelyfreeze.timing.samples import median_of_each

_Key = TypeVar("_Key")


@dataclass(frozen=True)
class RankBatches:
    """One rank's batches since the last collection.

    Attributes:
        batches: Phase (its value) and span in milliseconds of each batch, oldest first; the same
            phases on every rank.
        durations_ms: Median time of each of the rank's actions over these batches, milliseconds.
    """

    batches: tuple[tuple[str, float], ...]
    durations_ms: dict[Action, float]


def misreading(durations_ms: Mapping[Action, float], span_ms: float) -> str | None:
    """Return what a clock cannot have shown in a batch of a rank; None if all of it can be.

    Args:
        durations_ms: Time of each action, milliseconds.
        span_ms: From the start of the first action to the end of the last.
    """
    for action, time_ms in durations_ms.items():
        if not (math.isfinite(time_ms) and time_ms >= 0.0):
            return f"{action} took {time_ms:g} ms"
    if not (math.isfinite(span_ms) and span_ms >= 0.0):
        return f"a batch took {span_ms:g} ms"
    return None


def rank_batches(batches: Sequence[tuple[Phase, Mapping[Action, float], float]]) -> RankBatches:
    """Return what a rank tells the others of its batches: nothing if a clock misread among them.

    All of them are left out then, since ranks' batches are matched by their number.

    Args:
        batches: Phase, time of each action and span of each batch, oldest first; milliseconds.
    """
    if any(misreading(durations_ms, span_ms) is not None for _, durations_ms, span_ms in batches):
        return RankBatches((), {})
    return RankBatches(
        tuple((phase.value, span_ms) for phase, _, span_ms in batches),
        median_of_each([durations_ms for _, durations_ms, _ in batches]),
    )


def slowest(processes: Iterable[Mapping[_Key, float]]) -> dict[_Key, float]:
    """Merge times that several processes measured; of replicas the slowest counts, milliseconds."""
    merged: dict[_Key, float] = {}
    for times_ms in processes:
        for key, time_ms in times_ms.items():
            merged[key] = max(time_ms, merged.get(key, 0.0))
    return merged


def slowest_durations(ranks: Sequence[RankBatches]) -> dict[Action, float]:
    """Merge the durations of all ranks; of replicas the slower counts, milliseconds."""
    return slowest(rank.durations_ms for rank in ranks)


def batch_times(
    dag: PipelineDag, ranks: Sequence[RankBatches], delays_ms: ArrayLike | None = None
) -> dict[Phase, tuple[float, ...]]:
    """Return the time in milliseconds of each batch, by phase, oldest first.

    Ranks share no clock. A rank's span runs from the start of its first action to the end of its
    last; a batch runs from the start of the first rank's first action. The distance between the two
    starts is the time of the actions in front of the rank's first one, which are forwards and
    follow each other without idle time but for what their messages take, so it is taken from their
    measured durations. The batch ends with the rank that ends last.

    Args:
        dag: Precedence graph that holds every action of ``ranks``.
        ranks: One entry per process; replicas may repeat actions, of which the slower counts.
        delays_ms: Latency of messages, as in ``start_times``; None for nothing.
    """
    durations_ms = np.zeros(len(dag.actions))
    for action, duration_ms in slowest_durations(ranks).items():
        durations_ms[dag.index[action]] = duration_ms
    starts_ms = start_times(dag, durations_ms, delays_ms)
    times: dict[Phase, list[float]] = {}
    n_batches = min((len(rank.batches) for rank in ranks), default=0)
    offsets_ms = [
        min((starts_ms[dag.index[a]] for a in rank.durations_ms), default=0.0) for rank in ranks
    ]
    for i in range(n_batches):
        phase = Phase(ranks[0].batches[i][0])
        batch_ms = max(
            offset_ms + rank.batches[i][1]
            for offset_ms, rank in zip(offsets_ms, ranks, strict=True)
        )
        times.setdefault(phase, []).append(batch_ms)
    return {phase: tuple(values) for phase, values in times.items()}
