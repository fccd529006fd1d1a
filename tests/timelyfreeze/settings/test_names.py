"""Settings whose rules stand in their types."""

import math
from dataclasses import dataclass
from typing import Annotated

import pytest

from timelyfreeze.files import OneOf, Within
from timelyfreeze.settings import AtLeast1, rule_errors


@dataclass(frozen=True)
class Settings:
    interval: AtLeast1 = 1
    share: Annotated[float, Within(0.0, 1.0, below=True)] = 0.0
    tau: Annotated[float, Within(0.0, above=True)] | None = None
    word: Annotated[str, OneOf("a", "b")] = "a"
    free: float = math.nan


@pytest.mark.parametrize(
    "settings", [Settings(), Settings(10**15 + 1, 0.999, 1e300, "b"), Settings(tau=5)]
)
def test_what_keeps_to_the_rules_is_taken(settings: Settings) -> None:
    assert list(rule_errors(settings, "some")) == []


def test_every_broken_rule_is_told_with_key_and_value() -> None:
    assert list(rule_errors(Settings(0, 1.0, 0.0, "c"), "some")) == [
        "some.interval is 0; it must be 1 or more",
        "some.share is 1.0; it must be 0 or more and below 1",
        "some.tau is 0.0; it must be above 0 and finite",
        "some.word is 'c'; known: a, b",
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_keeps_to_no_range(value: float) -> None:
    settings = Settings(interval=value, share=value, tau=value)  # type: ignore[arg-type]
    assert [error.partition(" ")[0] for error in rule_errors(settings)] == [
        "interval", "share", "tau"
    ]  # fmt: skip
