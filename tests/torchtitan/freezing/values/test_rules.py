"""The rule of each key, tried on both sides of its bounds; the words are golden."""

from typing import Any

from tests.timelyfreeze.helpers.rules import told_beside
from tests.tools.golden import assert_golden
from tests.torchtitan.helpers.job_configs import make_job_config
from torchtitan.freezing.values.rules import _RULES, rule_errors
from torchtitan.settings import with_values


def test_values_beside_each_bound_are_taken_or_told_with_the_rule() -> None:
    job_config, words = make_job_config(), ""
    for key, rule in _RULES:

        def told(value: Any, key: str = key) -> list[str]:
            return [*rule_errors(with_values(job_config, {key: value})).values()]

        words += told_beside(rule, told)
    assert_golden("key_rules.txt", "all", words)
