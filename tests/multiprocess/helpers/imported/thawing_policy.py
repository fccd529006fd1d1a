"""A policy that freezes a front and lets it learn again, in turns; and ``waits_for_front``."""

from collections.abc import Iterator
from dataclasses import dataclass

from imported import waits_for_front  # noqa: F401

from timelyfreeze.policies import Check, Decision, register_policy


@register_policy("thawing", whole_layers=True)
@dataclass(frozen=True)
class Thawing:
    """Freeze the first layers at every other check."""

    check_interval: int = 2
    layers: int = 4
    measurement = None

    def errors(self) -> Iterator[str]:
        return iter(())

    def start(self, check: Check) -> Decision:
        return Decision(check.layout.prefix(0))

    def decide(self, before: Decision, check: Check) -> Decision:
        return Decision(check.layout.prefix(self.layers * (check.number % 2)))
