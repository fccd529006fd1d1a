"""A method that lives outside the project: it freezes every other tensor, then the others."""

from dataclasses import dataclass

import numpy as np

from timelyfreeze.policies.policy import Decision, register_policy


@register_policy("every_other")
@dataclass(frozen=True)
class EveryOther:
    check_interval: int = 2
    """Steps from one check to the next."""

    first: int = 0
    """0 or 1: with which tensor to begin."""

    measurement = None

    def errors(self):
        if self.first not in (0, 1):
            yield f"freezing.every_other.first is {self.first}; it must be 0 or 1"

    def start(self, check):
        return self.decide(None, check)

    def decide(self, before, check):
        number = np.arange(len(check.layout.names))
        return Decision(number % 2 == (self.first + check.number) % 2)
