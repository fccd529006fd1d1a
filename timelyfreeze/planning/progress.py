"""How many more steps freezing takes to the same loss, estimated from what it adds to gradients.

A gradient of a microbatch has the second moment E|g|^2; freezing adds a variance of V E|g|^2 to it,
or to what is left of it. An optimizer that divides by the root of the second moment, as Adam does,
then steps 1 / sqrt(1 + V) as far along the mean gradient, so a loss takes sqrt(1 + V) times the
steps.

Where tokens are sampled, V is measured (``sampling.VarianceMeter``). Where a tensor is frozen in a
part r of the microbatches, its mean gradient is (1 - r) and its second moment at least (1 - r) of
what they were: the same formula with V = r / (1 - r).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.planning.program import variance_odds
from timelyfreeze.schedule import PipelineDag

# Ratios at which variance is measured; between two of them it is taken as linear.
MEASURED_RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# No mean gradient is left of a tensor that is always frozen; it learns nothing at all.
_MAX_TENSOR_RATIO = 0.99


# V of a stage at each of MEASURED_RATIOS, of tokens left out of its weight gradients.
VarianceCurve = tuple[float, ...]


def merged_curves(
    ranks: Iterable[Mapping[int, VarianceCurve]],
) -> dict[int, VarianceCurve]:
    """Return the curves of all ranks by stage: the mean of what replicas of one have measured."""
    by_stage: dict[int, list[VarianceCurve]] = {}
    for rank in ranks:
        for stage, curve in rank.items():
            by_stage.setdefault(stage, []).append(curve)
    return {stage: tuple(np.mean(curves, axis=0).tolist()) for stage, curves in by_stage.items()}


def steps_for_tensors(dag: PipelineDag, ratios: NDArray[np.float64]) -> float:
    """Return how many times as many steps a plan takes that freezes tensors at random.

    Args:
        dag: Precedence graph of A actions.
        ratios: Shape [A].
    """
    means = [
        float(ratios[(dag.stages == stage) & dag.freezable].mean()) for stage in range(dag.n_stages)
    ]
    odds = variance_odds(np.minimum(means, _MAX_TENSOR_RATIO))
    return math.sqrt(1.0 + float(odds.mean()))


def steps_for_tokens(
    dag: PipelineDag, ratios: NDArray[np.float64], curves: Mapping[int, VarianceCurve]
) -> float:
    """Return how many times as many steps a plan takes that samples tokens of weight gradients.

    Args:
        dag: Precedence graph of A actions.
        ratios: Shape [A].
        curves: Of every stage.
    """
    at = (0.0, *MEASURED_RATIOS)
    added = [
        float(np.interp(ratios[i], at, (0.0, *curves[action.stage])))
        for i, action in enumerate(dag.actions)
        if action.kind.freezable
    ]
    return math.sqrt(1.0 + float(np.mean(added)))
