"""A frozen prefix that grows by the same number of layers at every check.

A baseline of SmartPipe (Sec. V), which freezes one more layer with each epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from timelyfreeze.policies.policy import Check, Decision, register_policy
from timelyfreeze.settings import AtLeast0, AtLeast1, key, rule_errors


@register_policy("linear", whole_layers=True)
@dataclass(frozen=True)
class Linear:
    """Freeze a number of further front blocks at every check, the embedding with the first."""

    check_interval: AtLeast1 = 50
    """Steps from one check to the next."""

    layers_per_check: AtLeast1 = 1
    """How many more transformer blocks are frozen at each check."""

    max_layers: AtLeast0 | None = None
    """Stop at this many blocks, 0 or more; unset: all but the last."""

    measurement = None

    def errors(self) -> Iterator[str]:
        """Yield what is wrong with the settings."""
        yield from rule_errors(self, "linear")

    def start(self, check: Check) -> Decision:
        """Freeze nothing yet."""
        if self.max_layers is not None and self.max_layers > check.layout.n_layers:
            raise ValueError(
                f"{key('linear.max_layers')} is {self.max_layers}; "
                f"the model has {check.layout.n_layers}"
            )
        return self._prefix(check)

    def decide(self, before: Decision, check: Check) -> Decision:
        """Freeze what the number of the check says."""
        return self._prefix(check)

    def _prefix(self, check: Check) -> Decision:
        most = check.layout.n_layers - 1 if self.max_layers is None else self.max_layers
        n_frozen = min(check.number * self.layers_per_check, most)
        return Decision(check.layout.prefix(n_frozen), metrics={"frozen_layers": n_frozen})
