"""LISA: train both ends and a few random blocks, new in every interval (arXiv:2403.17919).

Embedding, final norm and head are always trained, and of the blocks between them a number drawn
uniformly. As the embedding is live, the chain of input gradients runs through the whole model: only
weight gradients of the frozen blocks are saved.
"""

from dataclasses import dataclass

import numpy as np

from timelyfreeze.policies.policy import Check, Decision, FreezePolicy, register_policy
from timelyfreeze.settings import AtLeast0, AtLeast1


@register_policy("lisa", whole_layers=True)
@dataclass(frozen=True)
class Lisa(FreezePolicy):
    """Freeze all transformer blocks but a few random ones."""

    check_interval: AtLeast1 = 20
    """Steps for which the drawn blocks are trained."""

    active_layers: AtLeast0 = 2
    """gamma: how many transformer blocks are trained at a time, 0 or more."""

    def start(self, check: Check) -> Decision:
        """Draw the first blocks."""
        check.layout.require_layers("lisa.active_layers", self.active_layers)
        return self._draw(check)

    def decide(self, before: Decision, check: Check) -> Decision:
        """Draw new blocks, whatever was drawn before."""
        return self._draw(check)

    def _draw(self, check: Check) -> Decision:
        layout = check.layout
        # Nothing but seed and check, so that all ranks and a resumed run draw the same.
        rng = np.random.default_rng((check.seed, check.number))
        active = rng.choice(layout.n_layers, size=self.active_layers, replace=False)
        in_blocks = (layout.layers >= 0) & (layout.layers < layout.n_layers)
        return Decision(in_blocks & ~np.isin(layout.layers, active))
