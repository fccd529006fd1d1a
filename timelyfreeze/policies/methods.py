"""Methods: the values of ``method``.

A method answers two questions. *How much* is frozen in a backward: by a plan from measured times,
or as a policy decides. *Which* tensors: drawn at random, or by a policy. Every policy can answer
the second alone, or have the first answered by the plan (arXiv:2602.05754, App. C.2).
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from timelyfreeze.policies.policy import LORA, NONE, PLANNED, FreezePolicy, registered_policies
from timelyfreeze.settings import key


@dataclass(frozen=True)
class Method:
    """Parts of a method."""

    plans: bool  # whether times are measured and a plan says how much to freeze
    policy: str | None  # name of the policy that says which tensors, or None


def known_methods() -> list[str]:
    """Return all values of ``method``."""
    policies = sorted(registered_policies())
    return [NONE, PLANNED, *policies, *(f"{PLANNED}+{policy}" for policy in policies), LORA]


def parse_method(text: str) -> Method | None:
    """Read a method: ``timelyfreeze``, a policy, or ``timelyfreeze+<policy>``.

    None for ``none`` and ``lora``, without any change of frozen tensors.
    """
    if text not in known_methods():
        near = difflib.get_close_matches(text, known_methods(), n=1)
        hint = f", nearest to {near[0]!r}" if near else ""
        known = ", ".join(known_methods())
        raise ValueError(f"{key('method')} is {text!r}{hint}; known: {known}")
    if not freezes_by_turns(text):
        return None
    first, _, second = text.partition("+")
    return Method(True, second or None) if first == PLANNED else Method(False, first)


def freezes_by_turns(text: str) -> bool:
    """Return whether a method freezes some tensors now and others later; two methods do not."""
    return text not in (NONE, LORA)


def makes_plan(text: str) -> bool:
    """Return whether a method freezes by a plan; False for unknown methods."""
    return text.partition("+")[0] == PLANNED and text in known_methods()


def chosen_policy(
    method: str | FreezePolicy, policy: FreezePolicy | Mapping[str, Any] | None
) -> tuple[bool, FreezePolicy | None]:
    """Return whether a plan is made, and the policy choosing tensors.

    ``policy`` has the settings of ``method``'s policy, or is a policy of one's own for ``method =
    "timelyfreeze"``.
    """
    if not isinstance(method, str):
        if policy is not None:
            raise ValueError("policy is given, but method is a policy already; leave policy out")
        return False, method
    chosen = parse_method(method)
    if chosen is None:
        why = "freezes nothing" if method == NONE else "is for training with TorchTitan"
        raise ValueError(f"method is {method!r}, which {why}; train without TimelyFreeze")
    if chosen.policy is None:
        if isinstance(policy, Mapping):
            raise ValueError(
                f"policy is {dict(policy)}, but method {method!r} names no policy to set; write "
                f'method = "{PLANNED}+<policy>", or hand over a policy'
            )
        return True, policy
    kind = registered_policies()[chosen.policy]
    if policy is None or isinstance(policy, Mapping):
        known = [field.name for field in fields(kind)]
        unknown = sorted(set(policy or {}) - set(known))
        if unknown:
            raise ValueError(f"policy has {', '.join(unknown)}; {chosen.policy} knows: {known}")
        return chosen.plans, kind(**(policy or {}))
    if not isinstance(policy, kind):
        raise ValueError(
            f"policy is {policy!r}, but method is {method!r}; it must be a {kind.__name__} or its "
            "settings"
        )
    return chosen.plans, policy
