"""Objects that are read from JSON files of anyone."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from timelyfreeze.files.plain_json import number_of, read_object, whole_of


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[1]", "file.json is list; it must be an object"),
        ("{", "file.json is not JSON: Expecting property name"),
        ('{"a": ' * 10**5, "file.json is not JSON: it is nested too deeply"),
        ('{"\\ud800": 1}', "file.json holds half a character"),
        ('{"a": ["\\udc00"]}', "file.json holds half a character"),
    ],
)
def test_what_cannot_be_read_or_written_again_is_refused(
    text: str, wrong: str, tmp_path: Path
) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^{re.escape(wrong)}"):
        read_object(path)


def test_whole_characters_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text('{"\\ud83d\\ude00": "ä"}')
    assert read_object(path) == {"\U0001f600": "ä"}


@pytest.mark.parametrize("value", [True, False, "1", None, [1], math.nan, math.inf, 10**400])
def test_what_is_no_finite_number_is_refused(value: Any) -> None:
    for read in (number_of, whole_of):
        with pytest.raises(ValueError, match=r"^a\.b is .*; it must be "):
            read("a.b", value)
