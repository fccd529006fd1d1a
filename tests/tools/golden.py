"""Texts that tests expect, in files under tests/assets/golden.

A file has a section for each scenario of a test. `REWRITE_GOLDEN=1 scripts/test.sh FILE` writes the
sections anew: read the difference, by hand, before it is committed.
"""

import os
import re
from collections.abc import Collection
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "assets" / "golden"
_HEADING = "=== "


def sections(file: str) -> dict[str, str]:
    """Return {scenario: text} of a file, {} of one that is not there yet."""
    path = FOLDER / file
    if not path.exists():
        return {}
    _, *parts = re.split(f"^{_HEADING}", path.read_text(), flags=re.MULTILINE)
    return {name: text for name, _, text in (part.partition("\n") for part in parts)}


def assert_golden(file: str, name: str, text: str) -> None:
    """Assert that the text of a scenario is the one in the file, or write it there."""
    known = sections(file)
    if os.environ.get("REWRITE_GOLDEN"):
        known[name] = text
        together = "".join(f"{_HEADING}{key}\n{value}" for key, value in known.items())
        (FOLDER / file).write_text(together)
    else:
        assert text == known[name]


def assert_only(file: str, names: Collection[str]) -> None:
    """Assert that a file has no section of a scenario that is gone."""
    assert sections(file).keys() <= set(names)
