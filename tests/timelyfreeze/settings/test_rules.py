"""The rule of each setting, tried on both sides of its bounds; the words are golden."""

from typing import Any

import pytest

from tests.timelyfreeze.helpers.rules import rules_of, told_beside
from tests.tools.golden import assert_golden, assert_only
from timelyfreeze.policies import registered_policies
from timelyfreeze.settings import CacheSettings, ElasticSettings, FreezeSettings, PackingSettings

FILE = "setting_rules.txt"
SECTIONS: dict[str, Any] = {
    "freezing": FreezeSettings,
    "cache": CacheSettings,
    "elastic": ElasticSettings,
    "packing": PackingSettings,
    **registered_policies(),
}


@pytest.mark.parametrize("section", SECTIONS)
def test_values_beside_each_bound_are_taken_or_told_with_the_rule(section: str) -> None:
    words = ""
    for name, rule in rules_of(SECTIONS[section]).items():
        key = name if section == "freezing" else f"{section}.{name}"

        def told(value: Any, name: str = name, key: str = key) -> list[str]:
            errors = SECTIONS[section](**{name: value}).errors()
            return [error for error in errors if error.startswith(f"{key} is {value!r}; ")]

        words += told_beside(rule, told)
    assert_golden(FILE, section, words)


def test_every_section_that_is_expected_is_there() -> None:
    assert_only(FILE, SECTIONS)
