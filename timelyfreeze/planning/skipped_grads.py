"""Backwards that nobody needs: of microbatches in which all stages in front are frozen whole.

A stage computes the gradient of its input for the stages in front of it. Where all of those are
frozen whole for a microbatch, none of them has a use for it; and where the stage is frozen whole
too, nothing is left of its backward. These leading stages are the *front* of a microbatch. Its
depth is how many they are: with 3, stages 0, 1 and 2 do no backward for the microbatch.

The linear program of arXiv:2602.05754 knows no such thing: there, a backward frozen whole still
takes the time of its input gradient, in every stage. Notation: A actions, S stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from timelyfreeze.schedule import ActionKind, PipelineDag
from timelyfreeze.timing import DurationBounds, receiving


def front_depths(dag: PipelineDag, ratios: ArrayLike) -> dict[int, int]:
    """Return how many leading stages are frozen whole, by microbatch; those with none are left out.

    Args:
        dag: Precedence graph of A actions.
        ratios: Freeze ratio of each action, shape [A].
    """
    whole = np.asarray(ratios, dtype=np.float64) == 1.0
    frozen = {
        (a.stage, a.microbatch) for a, is_whole in zip(dag.actions, whole, strict=True) if is_whole
    }
    depths = {}
    for microbatch in sorted({microbatch for stage, microbatch in frozen if stage == 0}):
        depth = 1
        while (depth, microbatch) in frozen:
            depth += 1
        depths[microbatch] = depth
    return depths


def behind_first(dag: PipelineDag, depths: Mapping[int, int]) -> NDArray[np.bool_]:
    """Return which actions do nothing because of a front, shape [A].

    They are the backwards of its stages, both halves of a split one. Those of the first stage are
    not among them: it has no input gradient to leave out, and its bounds say what it takes.
    """
    return np.array(
        [
            action.kind is not ActionKind.FORWARD
            and 0 < action.stage < depths.get(action.microbatch, 0)
            for action in dag.actions
        ],
        dtype=np.bool_,
    )


def idle_ms(dag: PipelineDag, bounds: DurationBounds) -> NDArray[np.float64]:
    """Return what an action takes that does nothing, shape [A]: it still waits for its message."""
    return np.where(receiving(dag), np.float64(bounds.p2p_overhead_ms), 0.0)


def shortened(
    dag: PipelineDag, bounds: DurationBounds, depths: Mapping[int, int]
) -> DurationBounds:
    """Return the bounds under which given fronts are nothing out of the ordinary.

    In them a backward of a front that is frozen whole takes what an idle action takes; the input
    half of a split one takes that in any case.
    """
    idle = behind_first(dag, depths)
    nothing_ms = idle_ms(dag, bounds)
    return replace(
        bounds,
        min_ms=np.where(idle, nothing_ms, bounds.min_ms),
        max_ms=np.where(idle & ~dag.freezable, nothing_ms, bounds.max_ms),
    )
