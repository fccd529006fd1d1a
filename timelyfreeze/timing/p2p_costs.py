"""What passing messages costs: the part of a batch's time that no action accounts for.

An action that works on what another rank has sent begins a little later than the longest path says:
the message travels, a thread has to be woken, the host does its bookkeeping. None of it can be told
apart, on one rank, from waiting for a peer that is still at work. Together it shows: measured
batches take longer than their actions and dependencies explain.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from timelyfreeze.schedule import Action, ActionKind, PipelineDag
from timelyfreeze.timing.bounds import DurationBounds
from timelyfreeze.timing.processors import play_batch

_BISECTIONS = 40


def receiving(dag: PipelineDag) -> NDArray[np.bool_]:
    """Return which actions work on what another rank has sent, shape [A]."""
    rank_of_stage = {int(s): int(r) for s, r in zip(dag.stages, dag.ranks, strict=True)}
    return np.array([_receives(rank_of_stage, action) for action in dag.actions], dtype=np.bool_)


def message_time(
    dag: PipelineDag,
    durations_ms: ArrayLike,
    measured_ms: float,
    n_processors: float | None = None,
    delays_ms: ArrayLike | None = None,
) -> float:
    """Find what each message costs: the lead of receiving actions that explains a measured batch.

    Messages of a pipeline all have one size, so they get one number. It is 0 if the actions explain
    the batch, or if no message crosses ranks.
    """
    if not np.isfinite(measured_ms):
        raise ValueError(f"the measured batch time is {measured_ms}; it must be finite")
    durations = np.asarray(durations_ms, dtype=np.float64)
    receives = receiving(dag).astype(np.float64)

    def batch_ms(lead_ms: float) -> float:
        return play_batch(dag, durations + lead_ms * receives, n_processors, delays_ms)[1]

    missing_ms = measured_ms - batch_ms(0.0)
    if missing_ms <= 0.0 or not receives.any():
        return 0.0
    # A batch waits for one message or more, so one cannot cost more than all that is missing.
    low, high = 0.0, missing_ms
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if batch_ms(middle) < measured_ms else (low, middle)
    return low


def with_messages(
    dag: PipelineDag, bounds: DurationBounds, p2p_overhead_ms: float
) -> DurationBounds:
    """Return bounds in which each receiving action begins with its message.

    Freezing shortens no message: both bounds grow by the same.
    """
    lead_ms = p2p_overhead_ms * receiving(dag)
    return replace(
        bounds,
        min_ms=bounds.min_ms + lead_ms,
        max_ms=bounds.max_ms + lead_ms,
        p2p_overhead_ms=bounds.p2p_overhead_ms + p2p_overhead_ms,
    )


def _receives(rank_of_stage: dict[int, int], action: Action) -> bool:
    if action.kind is ActionKind.WEIGHT_BACKWARD:
        return False
    neighbour = action.stage - 1 if action.kind is ActionKind.FORWARD else action.stage + 1
    sender = rank_of_stage.get(neighbour)
    return sender is not None and sender != rank_of_stage[action.stage]
