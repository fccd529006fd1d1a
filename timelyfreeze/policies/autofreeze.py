"""AutoFreeze: freeze the front with the least change of gradient norms (arXiv:2102.01386).

At check K every live block l has a change of its gradient norm (Sec. 3.1, Eq. 1)

    eta_l = | ||Delta_{K-1}|| - ||Delta_K|| | / ||Delta_{K-1}||

Going from the front to the back, live blocks with eta_l below the N-th percentile of all live
blocks' eta are frozen, up to the first other block (Algorithm 1), for good.

**Two definitions are in use.** AutoFreeze accumulates *gradients* over an interval and takes the
absolute value; the default here. TimelyFreeze (arXiv:2602.05754, Sec. 2.3, Eq. 1) uses *updates*
    and the sign, so that a block with a growing norm counts as more stable than a block with a
    constant norm. ``delta`` and ``change`` choose.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from timelyfreeze.files import OneOf, Within
from timelyfreeze.policies.policy import (
    Check,
    Decision,
    FreezePolicy,
    Measurement,
    Metric,
    Source,
    register_policy,
)
from timelyfreeze.policies.prefix import layer_norms, leading_run, relative_change
from timelyfreeze.settings import AtLeast0, AtLeast1

ABSOLUTE = "absolute"
SIGNED = "signed"


@register_policy("autofreeze", whole_layers=True)
@dataclass(frozen=True)
class AutoFreeze(FreezePolicy):
    """Freeze front blocks, the embedding with them, while their gradient norms change little.

    The largest eta is not below any percentile, so at least one block always stays live. AutoFreeze
    sets the 50th percentile and checks five times an epoch (two to five did well, ten did not);
    TimelyFreeze sets the 80th for its comparison (Table 3).
    """

    check_interval: AtLeast1 = 50
    """Steps from one check to the next. The AutoFreeze paper recommends 2 to 5 checks an epoch."""

    checks_per_epoch: AtLeast0 = 0
    """Checks in a pass over the examples, evenly, instead of check_interval; 0 for the interval."""

    percentile: Annotated[float, Within(0.0, 100.0)] = 50.0
    """N: blocks with changes below this percentile may be frozen, in [0, 100]."""

    delta: Annotated[str, OneOf(Source.GRADIENTS.value, Source.UPDATES.value)] = (
        Source.GRADIENTS.value
    )
    """What is summed up from check to check: "gradients" (AutoFreeze) or "updates" of the weights
    (as TimelyFreeze describes it)."""

    change: Annotated[str, OneOf(ABSOLUTE, SIGNED)] = ABSOLUTE
    """Whether the change of the norm counts as "absolute" (AutoFreeze) or "signed" (as
    TimelyFreeze describes it: growing norms count as most stable)."""

    @property
    def measurement(self) -> Measurement:
        """Squares of the sum of gradients or updates."""
        return Measurement(Source(self.delta), (Metric.SQUARE_SUM,))

    def in_epochs_of(self, n_steps: float) -> AutoFreeze:
        """Return the rule with the interval of ``checks_per_epoch`` for such epochs."""
        if self.checks_per_epoch == 0:
            return self
        return replace(self, check_interval=max(1, round(n_steps / self.checks_per_epoch)))

    def start(self, check: Check) -> Decision:
        """Freeze nothing before there is a change."""
        memory = {"frozen_layers": 0, "norms": None}
        return Decision(check.layout.prefix(0), memory, {"frozen_layers": 0})

    def decide(self, before: Decision, check: Check) -> Decision:
        """Extend the prefix over blocks below the percentile; at K = 1 there is no change yet."""
        n_frozen = before.memory["frozen_layers"]
        norms = layer_norms(check.layout, check.metrics[Metric.SQUARE_SUM])
        metrics: dict[str, float] = {}
        if before.memory["norms"] is not None:
            previous = np.array(before.memory["norms"], dtype=np.float64)[n_frozen:]
            change = previous - norms[n_frozen:]
            if self.change == ABSOLUTE:
                change = np.abs(change)
            eta = relative_change(change, previous)
            limit = np.percentile(eta, self.percentile)
            metrics = {"eta_of_first_live_layer": float(eta[0]), "eta_limit": float(limit)}
            n_frozen += leading_run(eta < limit)
        memory = {"frozen_layers": n_frozen, "norms": norms.tolist()}
        metrics["frozen_layers"] = n_frozen
        return Decision(check.layout.prefix(n_frozen), memory, metrics)
