"""Skipped input gradients: backwards that nobody needs, behind stages that are frozen whole.

A stage computes the gradient of its input for the stages before it. Where all of those are
frozen whole for a microbatch, none of them has a use for it; and where the stage is frozen whole
too, nothing is left of its backward. How many leading stages these are is the *skip depth* of a
microbatch: with 3, stages 0, 1 and 2 do no backward for it.

The linear program of arXiv:2602.05754 knows no such thing: there, a backward frozen whole still
takes the time of its input gradient, in every stage. Notation: A actions, S stages.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from timelyfreeze.schedule import ActionKind, PipelineDag
from timelyfreeze.timing import DurationBounds, receiving


def skip_depths(dag: PipelineDag, ratios: ArrayLike) -> dict[int, int]:
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


def skipped_actions(dag: PipelineDag, depths: Mapping[int, int]) -> NDArray[np.bool_]:
    """Return which actions do nothing under given skip depths, shape [A].

    They are the backwards of the leading stages, both halves of a split one. Those of the first
    stage are not among them: it has no input gradient to leave out, and its bounds say what it
    takes.
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
