"""A frozen prefix growing by the same number of layers at every check.

A baseline of SmartPipe (Sec. V), with another frozen layer per epoch.
"""

from dataclasses import dataclass

from timelyfreeze.policies.policy import Check, Decision, FreezePolicy, register_policy
from timelyfreeze.settings import AtLeast0, AtLeast1


@register_policy("linear", whole_layers=True)
@dataclass(frozen=True)
class Linear(FreezePolicy):
    """Freeze a number of further front blocks at every check, the embedding with the first."""

    check_interval: AtLeast1 = 50
    """Steps from one check to the next."""

    layers_per_check: AtLeast1 = 1
    """How many more transformer blocks are frozen at each check."""

    max_layers: AtLeast0 | None = None
    """Stop at this many blocks, 0 or more; unset: all but the last."""

    def start(self, check: Check) -> Decision:
        """Freeze nothing yet."""
        check.layout.require_layers("linear.max_layers", self.max_layers or 0)
        return self.decide(Decision(check.layout.prefix(0)), check)

    def decide(self, before: Decision, check: Check) -> Decision:
        """Freeze by the number of the check."""
        most = check.layout.n_layers - 1 if self.max_layers is None else self.max_layers
        n_frozen = min(check.number * self.layers_per_check, most)
        return Decision(check.layout.prefix(n_frozen), metrics={"frozen_layers": n_frozen})
