"""SmartPipe: freeze front blocks with a constant gradient.

"SmartPipe: Intelligently Freezing Layers in Pipeline Parallelism for Distributed DNN Training",
Sec. III. At check K a live block l has the gradient norm difference (Definition 2, Eq. 3)

    eta_l = ||g_{K-1} - g_K|| / ||g_{K-1}||

with g_K the sum of its gradients since the check before. The live blocks from the front with eta_l
below tau, up to the first other block, are candidates (Definition 3); of the live blocks, no more
than a fraction lambda is frozen at a check (Definition 4, Eq. 4, with a real length; see
:func:`timelyfreeze.policies.prefix.grow`). Frozen blocks stay frozen. Algorithm 1 of the paper has
tau alone; lambda = 1 does without the bound of Eq. 4.

In the paper a small eta means a learned block. Two values help to choose tau: eta is 0 for a
constant gradient, and about sqrt(2) for two independent gradients.

The e_1 epochs without freezing of Algorithm 1 are the warm-up, ``freezing.last_warmup_step``, as
for every method.
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
from timelyfreeze.policies.prefix import (
    grow,
    layer_norms,
    leading_run,
    relative_change,
    whole_layers,
)
from timelyfreeze.settings import AtLeast1


@register_policy("smartpipe", whole_layers=True)
@dataclass(frozen=True)
class SmartPipe(FreezePolicy):
    """Freeze front blocks, the embedding with them, while their gradients change little.

    The last block always stays live. The paper gives no values for tau and lambda; lambda is set as
    its counterpart in PipeTransformer.
    """

    check_interval: AtLeast1 = 100
    """Steps from one check to the next."""

    tau: Annotated[float, Within(0.0, above=True)] = 1.0
    """Blocks whose normalised gradient difference is below it may be frozen; above 0."""

    rate: Annotated[float, Within(0.0, 1.0, above=True)] = 1 / 3
    """lambda: fraction of the live blocks that one check may freeze at most, in (0, 1]. 1 sets no
    bound, as Algorithm 1 of the paper has it."""

    measurement = Measurement(Source.GRADIENTS, (Metric.SQUARE_SUM, Metric.DIFFERENCE_SQUARE_SUM))

    def start(self, check: Check) -> Decision:
        """Freeze nothing before there is a difference."""
        memory = {"length": 0.0, "norms": None}
        return Decision(check.layout.prefix(0), memory, {"frozen_layers": 0})

    def decide(self, before: Decision, check: Check) -> Decision:
        """Extend the prefix over candidates; at K = 1 there is nothing to compare with."""
        layout = check.layout
        length = before.memory["length"]
        norms = layer_norms(layout, check.metrics[Metric.SQUARE_SUM])
        metrics: dict[str, float] = {}
        if before.memory["norms"] is not None:
            n_frozen = whole_layers(length, layout.n_layers)
            previous = np.array(before.memory["norms"], dtype=np.float64)
            difference = layer_norms(layout, check.metrics[Metric.DIFFERENCE_SQUARE_SUM])
            eta = relative_change(difference[n_frozen:], previous[n_frozen:])
            metrics["eta_of_first_live_layer"] = float(eta[0])
            wanted = n_frozen + leading_run(eta < self.tau)
            length = grow(length, layout.n_layers, self.rate, wanted)
        n_frozen = whole_layers(length, layout.n_layers)
        memory = {"length": length, "norms": norms.tolist()}
        metrics["frozen_layers"] = n_frozen
        return Decision(layout.prefix(n_frozen), memory, metrics)
