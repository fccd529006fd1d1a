"""PipeTransformer: freeze up to the block with the smallest gradient, within a bound.

He et al., "PipeTransformer: Automated Elastic Pipelining for Distributed Training of Large-scale
Models", 2021. At check T the prefix has the length (Sec. 3.1, Eq. 1)

    L^(T) = min( L^(T-1) + alpha (L - L^(T-1)),  argmin over live blocks l of ||g_l|| )

with g_l the gradient of block l in the step of the check. Where the equation leaves a choice:

- The length is a real number and its whole part is frozen; see :func:`grow` (``prefix``).
- The argmin counts layers up to and with the block of the smallest norm. Counting only the blocks
    in front, the first block could never be frozen while its own norm is the smallest.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from timelyfreeze.files import Within
from timelyfreeze.policies.policy import (
    Check,
    Decision,
    FreezePolicy,
    Measurement,
    Metric,
    Source,
    register_policy,
)
from timelyfreeze.policies.prefix import grow, layer_norms, whole_layers
from timelyfreeze.settings import AtLeast1


@register_policy("pipetransformer", whole_layers=True)
@dataclass(frozen=True)
class PipeTransformer(FreezePolicy):
    """Freeze a fraction of the live blocks at checks, no further than the smallest gradient.

    The last block always stays live. The paper calls alpha = 1/3 conservative, with accuracy as
    without freezing or better; 2/5 and 1/2 were faster and lost a little.
    """

    check_interval: AtLeast1 = 100
    """Steps from one check to the next. The paper leaves it open."""

    alpha: Annotated[float, Within(0.0, 1.0, above=True, below=True)] = 1 / 3
    """Fraction of the live blocks that one check may freeze at most, in (0, 1)."""

    measurement = Measurement(Source.LAST_GRADIENT, (Metric.SQUARE_SUM,))

    def start(self, check: Check) -> Decision:
        """Freeze nothing: L^(0) is 0."""
        return Decision(check.layout.prefix(0), {"length": 0.0}, {"frozen_layers": 0})

    def decide(self, before: Decision, check: Check) -> Decision:
        """Extend the prefix; without finite norms nothing changes."""
        n_layers = check.layout.n_layers
        length = before.memory["length"]
        n_frozen = whole_layers(length, n_layers)
        norms = layer_norms(check.layout, check.metrics[Metric.SQUARE_SUM])[n_frozen:]
        if not np.isfinite(norms).all():
            return before
        length = grow(length, n_layers, self.alpha, n_frozen + int(norms.argmin()) + 1)
        n_frozen = whole_layers(length, n_layers)
        metrics = {"frozen_layers": n_frozen}
        return Decision(check.layout.prefix(n_frozen), {"length": length}, metrics)
