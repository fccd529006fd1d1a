"""Whether actions still take what was measured, and bounds that follow where they do not.

In the stable phase every action runs at its planned ratio, so each of its times says how far the
line between its bounds has moved, not which end of it. Machines slow down and rows grow longer for
all microbatches of a stage alike: times are pooled by stage and kind, and both bounds move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from timelyfreeze.actions import Action, ActionKind
from timelyfreeze.bounds import DurationBounds
from timelyfreeze.dag import PipelineDag
from timelyfreeze.messages import receiving

Group = tuple[int, ActionKind]

# Shares of the longest action below which a time is nothing: what is frozen whole takes none.
_NEGLIGIBLE = 1e-3


def drifts(
    dag: PipelineDag,
    bounds: DurationBounds,
    ratios: ArrayLike,
    observed_ms: Mapping[Action, float],
) -> dict[Group, float]:
    """Return how much longer actions take than their bounds say, by stage and kind.

    Args:
        dag: Precedence graph of A actions.
        bounds: What was measured before.
        ratios: Freeze ratio that each action ran at, shape [A].
        observed_ms: Median time of actions since; those of replicas are the slowest one's.

    Returns:
        By stage and kind the median over their actions of observed over expected time: 1 where
        nothing has moved. Left out are stages and kinds of which nothing that takes time was seen.
    """
    expected = _at(bounds, ratios) - bounds.message_ms * receiving(dag)
    least_ms = _NEGLIGIBLE * float(bounds.max_ms.max(initial=0.0))
    found: dict[Group, list[float]] = {}
    for action, time_ms in observed_ms.items():
        expected_ms = float(expected[dag.index[action]])
        if expected_ms > least_ms:
            found.setdefault((action.stage, action.kind), []).append(time_ms / expected_ms)
    return {group: float(np.median(values)) for group, values in found.items()}


def largest_move(drift: Mapping[Group, float]) -> float:
    """Return the largest share by which times have moved, up or down; 0 if none were seen."""
    return max((abs(factor - 1.0) for factor in drift.values()), default=0.0)


def moved_bounds(
    dag: PipelineDag, bounds: DurationBounds, drift: Mapping[Group, float]
) -> DurationBounds:
    """Return bounds that have moved as far as the times; the price of messages stays.

    Args:
        dag: Precedence graph of A actions.
        bounds: What was measured before.
        drift: As :func:`drifts` returns it; what is missing has not moved.
    """
    factors = np.array([drift.get((a.stage, a.kind), 1.0) for a in dag.actions])
    lead_ms = bounds.message_ms * receiving(dag)
    return replace(
        bounds,
        min_ms=(bounds.min_ms - lead_ms) * factors + lead_ms,
        max_ms=(bounds.max_ms - lead_ms) * factors + lead_ms,
    )


def _at(bounds: DurationBounds, ratios: ArrayLike) -> NDArray[np.float64]:
    r = np.asarray(ratios, dtype=np.float64)
    return (1.0 - r) * bounds.max_ms + r * bounds.min_ms
