"""The first k layers stay frozen: the simplest baseline of SmartPipe (Sec. V) and AutoFreeze."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from timelyfreeze.policies.policy import Check, Decision, register_policy
from timelyfreeze.settings import AtLeast0, key, rule_errors


@register_policy("fixed", whole_layers=True)
@dataclass(frozen=True)
class Fixed:
    """Freeze the first layers, the embedding with them, from the end of warm-up on."""

    layers: AtLeast0 = 1
    """How many transformer blocks from the front are frozen."""

    check_interval = sys.maxsize  # never: there is nothing to decide anew
    measurement = None

    def errors(self) -> Iterator[str]:
        """Yield what is wrong with the settings."""
        yield from rule_errors(self, "fixed")

    def start(self, check: Check) -> Decision:
        """Freeze the prefix."""
        if self.layers > check.layout.n_layers:
            raise ValueError(
                f"{key('fixed.layers')} is {self.layers}; the model has {check.layout.n_layers}"
            )
        return Decision(check.layout.prefix(self.layers), metrics={"frozen_layers": self.layers})

    def decide(self, before: Decision, check: Check) -> Decision:
        """Leave everything as it is."""
        return before
