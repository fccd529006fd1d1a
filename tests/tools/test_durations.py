"""The suite has a budget: what it took when it was last measured, on two cores and alone."""

import json

import pytest

from tests.tools.durations import FILE, ROOT

BUDGET_S = {"unit": 120, "one_process": 240, "several_processes": 520}
MEASURED = json.loads(FILE.read_text())


@pytest.mark.parametrize("part", BUDGET_S)
def test_a_part_keeps_within_its_budget(part: str) -> None:
    assert MEASURED["parts"][part]["seconds"] <= BUDGET_S[part]


def test_the_longest_tests_are_tests_of_today() -> None:
    """Otherwise the file is of another suite: measure again, see ``tests/tools/durations.py``."""
    files = {name.partition("::")[0] for name in MEASURED["longest"]}
    assert [file for file in files if not (ROOT / file).is_file()] == []
