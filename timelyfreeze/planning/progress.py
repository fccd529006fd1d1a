"""How many more steps freezing takes to the same loss, estimated from what it does to gradients.

Where a tensor is frozen in a part r of the microbatches, the mean of its gradient is (1 - r) and
the second moment at least (1 - r) of what they were. An optimizer that divides by the root of the
second moment, as Adam does, then steps sqrt(1 - r) as far along the mean gradient, so a loss takes
sqrt(1 + V) times the steps, with V = r / (1 - r). Frozen weights that still get the part c of the
gradient's energy, in a subspace, lose r (1 - c) instead of r.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.schedule import PipelineDag

# No mean gradient is left of a tensor that is always frozen; it learns nothing at all.
_MAX_RATIO = 0.99


def steps_factor(dag: PipelineDag, ratios: NDArray[np.float64], captured: float = 0.0) -> float:
    """Return how many times as many steps a plan takes: sqrt(1 + V), V the mean over stages.

    Args:
        dag: Precedence graph of A actions.
        ratios: Shape [A].
        captured: c, in [0, 1].
    """
    means = [
        float(ratios[(dag.stages == stage) & dag.freezable].mean()) for stage in range(dag.n_stages)
    ]
    most = np.minimum((1.0 - captured) * np.array(means), _MAX_RATIO)
    return math.sqrt(1.0 + float((most / (1.0 - most)).mean()))
