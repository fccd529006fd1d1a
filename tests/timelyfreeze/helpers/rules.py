"""Rules of settings, and values on both sides of each of their bounds."""

import math
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from timelyfreeze.files import OneOf, Within

Rule = Within | OneOf


def rule_of(hint: Any) -> Rule | None:
    """The rule in a type, of an optional one too."""
    if get_origin(hint) is Annotated:
        found: Rule = get_args(hint)[1]
        return found
    return next((rule for kind in get_args(hint) if (rule := rule_of(kind))), None)


def rules_of(section: type) -> dict[str, Rule]:
    """The rule of each field that has one."""
    hints = get_type_hints(section, include_extras=True)
    return {name: rule for name, hint in hints.items() if (rule := rule_of(hint))}


def both_sides(rule: Rule) -> tuple[list[Any], list[Any]]:
    """Values that only just keep to a rule, and some that only just break it."""
    if isinstance(rule, OneOf):
        return [*rule._words], ["", f" {rule._words[0]}"]
    right, wrong, odd = [], [], [math.nan]
    for bound, is_excluded, outwards in (
        (rule.low, rule.above, -math.inf),
        (rule.high, rule.below, math.inf),
    ):
        if math.isinf(bound):
            odd += [bound] * isinstance(rule.low, float)
            continue
        beyond, within = _next(bound, outwards), _next(bound, -outwards)
        right.append(within if is_excluded else bound)
        wrong.append(bound if is_excluded else beyond)
    return (right + odd, wrong) if rule.or_odd else (right, wrong + odd)


def _next(value: float, towards: float) -> float:
    """The whole number beside a whole number, the float beside a float."""
    if isinstance(value, int):
        return value + (1 if towards > 0 else -1)
    return math.nextafter(value, towards)


def told_beside(rule: Rule, errors_of: Callable[[Any], list[str]]) -> str:
    """Return what is told of the first value with each error; the right ones must have none."""
    right, wrong = both_sides(rule)
    assert [errors_of(value) for value in right] == [[]] * len(right)
    first: dict[str, str] = {}
    for value in wrong:
        [error] = errors_of(value)
        first.setdefault(error.partition("; ")[2], error)
    return "".join(f"{error}\n" for error in first.values())
