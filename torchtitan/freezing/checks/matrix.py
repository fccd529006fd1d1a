"""What of a run goes together: features, and what each needs of the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torchtitan.freezing.config import JobConfig

Test = Callable[[JobConfig], Any]


@dataclass(frozen=True)
class Requirement:
    """Something that features need of the rest of a run.

    Attributes:
        without: What a feature with this need cannot be with, in the words of the table for users.
        found: The key that breaks it, which is told with its value, or a sentence.
        is_met: Whether a run has it.
        rule: What to change where it has not.
    """

    without: str
    found: str
    is_met: Test
    rule: str


@dataclass(frozen=True)
class Feature:
    """Something that a run may have.

    Attributes:
        key: The key that switches it on, which is told with its value, or a sentence.
        why: The reason for what it needs.
        needs: What it needs of the rest.
        when: Whether a run has it; None where any value of the key but 0, "" and false does it.
        title: How to switch it on, in the words of the table for users; "" for the key.
    """

    key: str
    why: str
    needs: Sequence[Requirement]
    when: Test | None = None
    title: str = ""

    def is_on(self, config: JobConfig) -> bool:
        """Return whether a run has it."""
        return bool(attrgetter(self.key)(config) if self.when is None else self.when(config))


def feature_errors(config: JobConfig, features: Sequence[Feature]) -> Iterator[str]:
    """Yield what the features that a run has need and do not find: key, value and rule."""
    for feature in features:
        if feature.is_on(config):
            for need in feature.needs:
                if not need.is_met(config):
                    found = f"{_told(config, feature.key)}, and {_told(config, need.found)}"
                    yield f"{found}; {feature.why}, so {need.rule}"


def feature_table(features: Sequence[Feature]) -> str:
    """Return the features and what each cannot be with, as a table of Markdown."""
    rows = ["| setting | refused with | why |", "|---|---|---|"]
    for feature in features:
        needs = "; ".join(need.without for need in feature.needs)
        rows.append(f"| {feature.title or f'`{feature.key}`'} | {needs} | {feature.why} |")
    return "\n".join(rows) + "\n"


def one_of(key: str, *allowed: Any, without: str = "") -> Requirement:
    """Return the requirement that a key has one of some values, told as ``without`` if given."""
    values, value_of = " or ".join(map(_shown, allowed)), attrgetter(key)
    other = f"`{key}`" + (f" other than {values}" if allowed[0] else "")
    return Requirement(
        without or other, key, lambda config: value_of(config) in allowed, f"it must be {values}"
    )


def without(feature: Feature) -> Requirement:
    """Return the requirement that a run does not have another feature."""
    return Requirement(
        feature.title or f"`{feature.key}`",
        feature.key,
        lambda config: not feature.is_on(config),
        "switch one of them off",
    )


def _told(config: JobConfig, found: str) -> str:
    return found if " " in found else f"{found} is {_shown(attrgetter(found)(config))}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "unset" if value is None else repr(value)
