"""The first k layers stay frozen: the simplest baseline of SmartPipe (Sec. V) and AutoFreeze."""

import sys
from dataclasses import dataclass

from timelyfreeze.policies.policy import Check, Decision, FreezePolicy, register_policy
from timelyfreeze.settings import AtLeast0


@register_policy("fixed", whole_layers=True)
@dataclass(frozen=True)
class Fixed(FreezePolicy):
    """Freeze the first layers, the embedding with them, from the end of warm-up on."""

    layers: AtLeast0 = 1
    """How many transformer blocks from the front are frozen."""

    check_interval = sys.maxsize  # never: there is nothing to decide again

    def start(self, check: Check) -> Decision:
        """Freeze the prefix."""
        check.layout.require_layers("fixed.layers", self.layers)
        return Decision(check.layout.prefix(self.layers), metrics={"frozen_layers": self.layers})

    def decide(self, before: Decision, check: Check) -> Decision:
        """Leave everything as it is."""
        return before
