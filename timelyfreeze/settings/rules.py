"""The rules of settings, which stand in the types of their fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, get_type_hints

from timelyfreeze.files import Within, broken_rule
from timelyfreeze.settings.names import key

# Whole numbers without a largest one.
AtLeast0 = Annotated[int, Within(0, whole=True)]
AtLeast1 = Annotated[int, Within(1, whole=True)]


def rule_errors(settings: Any, section: str = "", rules: type | None = None) -> Iterator[str]:
    """Yield which fields of a dataclass break the rule of their type: key, value and rule.

    Keys begin with ``section``, such as ``apf``. Of another dataclass with ``rules`` those of the
    fields hold that it has too.
    """
    prefix = f"{section}." if section else ""
    for name, hint in get_type_hints(rules or type(settings), include_extras=True).items():
        value = getattr(settings, name, None)
        if hasattr(settings, name) and (rule := broken_rule(hint, value)):
            yield f"{key(prefix + name)} is {value!r}; {rule}"
