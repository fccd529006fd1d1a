"""Whether actions still take what was measured, and bounds that follow where they do not.

In the stable phase every action runs at its planned ratio, so each of its times says how far the
line between its bounds has moved, not which end of it. Machines slow down and rows grow longer for
all microbatches of a stage alike: times are pooled by stage and kind, and both bounds move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from timelyfreeze.schedule import Action, ActionKind, PipelineDag
from timelyfreeze.timing import DurationBounds, receiving

Group = tuple[int, ActionKind]

# Of a backward that takes less than this fraction of its unfrozen time, what is left is
# bookkeeping: it may take thrice as long as before, and says nothing of the work that is not there.
_LEAST_SHARE = 0.1


def drifts(
    dag: PipelineDag,
    bounds: DurationBounds,
    planned_ms: ArrayLike,
    observed_ms: Mapping[Action, float],
) -> dict[Group, float]:
    """Return how much longer actions take than their plan says, by stage and kind.

    Args:
        dag: Precedence graph of A actions.
        bounds: What the plan was made from.
        planned_ms: Duration of each action under the plan, shape [A], milliseconds.
        observed_ms: Median time of actions since; those of replicas are the slowest one's.

    Returns:
        By stage and kind the median over their actions, each with the weight of its planned time,
        of observed over planned time: 1 where nothing has moved. Left out are stages and kinds of
        which nothing that takes time was seen.
    """
    lead_ms = bounds.p2p_overhead_ms * receiving(dag)
    planned = np.asarray(planned_ms, dtype=np.float64) - lead_ms
    least = _LEAST_SHARE * (bounds.max_ms - lead_ms)
    found: dict[Group, list[tuple[float, float]]] = {}
    for action, time_ms in observed_ms.items():
        own_ms = float(planned[dag.index[action]])
        if own_ms > max(0.0, float(least[dag.index[action]])):
            found.setdefault((action.stage, action.kind), []).append((time_ms / own_ms, own_ms))
    return {group: _weighted_median(values) for group, values in found.items()}


def forward_drift(drift: Mapping[Group, float]) -> float | None:
    """Return how much longer forwards take than planned: the median over stages of :func:`drifts`.

    No freezing shortens them but in the first stage, which counts only where there is no other: one
    that is frozen whole keeps nothing for a backward. 1 where the machine is as fast as it was;
    None if no forward was seen.
    """
    forwards = {stage: f for (stage, kind), f in drift.items() if kind is ActionKind.FORWARD}
    behind = [factor for stage, factor in forwards.items() if stage > 0]
    factors = behind or list(forwards.values())
    return float(np.median(factors)) if factors else None


def largest_move(drift: Mapping[Group, float]) -> float:
    """Return the largest share by which times have moved, up or down; 0 if none were seen."""
    return max((abs(factor - 1.0) for factor in drift.values()), default=0.0)


def moved_bounds(
    dag: PipelineDag, bounds: DurationBounds, drift: Mapping[Group, float]
) -> DurationBounds:
    """Return bounds that have moved as far as the times; the overhead of messages stays.

    Args:
        dag: Precedence graph of A actions.
        bounds: What was measured before.
        drift: As :func:`drifts` returns it. A kind that is missing, as one that is frozen whole
            and takes no time, moves as the rest of its stage does; a stage that is missing has not
            moved.
    """
    by_stage = {
        stage: float(np.median([factor for (s, _), factor in drift.items() if s == stage]))
        for stage, _ in drift
    }
    factors = np.array(
        [drift.get((a.stage, a.kind), by_stage.get(a.stage, 1.0)) for a in dag.actions]
    )
    lead_ms = bounds.p2p_overhead_ms * receiving(dag)
    return replace(
        bounds,
        min_ms=(bounds.min_ms - lead_ms) * factors + lead_ms,
        max_ms=(bounds.max_ms - lead_ms) * factors + lead_ms,
    )


def _weighted_median(values: list[tuple[float, float]]) -> float:
    """Return the value below which half of the weight lies; between two where that is a border."""
    pairs = np.array(sorted(values))
    reached = np.cumsum(pairs[:, 1]) / pairs[:, 1].sum()
    low, high = np.searchsorted(reached, [0.5 - 1e-9, 0.5 + 1e-9])
    return float(0.5 * (pairs[low, 0] + pairs[high, 0]))
