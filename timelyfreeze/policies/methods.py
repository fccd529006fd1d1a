"""Methods: what ``freezing.method`` can say.

A method answers two questions. *How much* is frozen in each backward: as a plan from measured times
says, or as it comes. *Which* tensors: drawn at random, or as a policy says. Every policy can
answer the second alone, or have the first answered by the plan (arXiv:2602.05754, App. C.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from timelyfreeze.policies.policy import NONE, PLANNED, registered_policies


@dataclass(frozen=True)
class Method:
    """What a method is made of.

    Attributes:
        plans: Whether times are measured and a plan says how much to freeze.
        policy: Name of the policy that says which tensors, or None.
    """

    plans: bool
    policy: str | None


def known_methods() -> list[str]:
    """Return every value that ``freezing.method`` may have."""
    policies = sorted(registered_policies())
    return [NONE, PLANNED, *policies, *(f"{PLANNED}+{policy}" for policy in policies)]


def parse_method(text: str) -> Method | None:
    """Read a method's name.

    Args:
        text: ``none``, ``timelyfreeze``, the name of a policy, or ``timelyfreeze+<policy>``.

    Returns:
        Method: None for ``none``.

    Raises:
        ValueError: If the name is unknown.
    """
    if text not in known_methods():
        raise ValueError(f"freezing.method is {text!r}; known: {', '.join(known_methods())}")
    if text == NONE:
        return None
    if text == PLANNED:
        return Method(plans=True, policy=None)
    planned, plus, policy = text.rpartition("+")
    return Method(plans=bool(plus and planned), policy=policy)
