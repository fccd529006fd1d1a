"""Objects that are read from JSON files of anyone."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pytest

from timelyfreeze.files import (
    WRITTEN,
    Count,
    Number,
    OneOf,
    Within,
    json_lines,
    read_as,
    read_dataclass,
    read_object,
    to_plain,
)
from timelyfreeze.schedule import Action, ActionKind, parse_action


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


@dataclass(frozen=True)
class Part:
    kind: ActionKind
    size: Count = 0


class Pair(NamedTuple):
    low: float
    high: Annotated[float, Within(0.0, above=True), WRITTEN] = 1.0


@dataclass(frozen=True)
class Larger(Part):
    more: tuple[int, str] = (0, "")


@dataclass(frozen=True)
class Whole:
    actions: Mapping[Action, Pair]
    by_stage: Mapping[int, float]
    part: Part | Larger | None = None
    parts: tuple[Part, ...] = ()
    names: list[str] = field(default_factory=list)
    is_on: bool = False
    word: Annotated[str, OneOf("B", "W")] | None = None
    loss: float = 0.0


WHOLE = Whole(
    actions={parse_action("1B2"): Pair(-1.0, 2.5)},
    by_stage={3: 0.5},
    part=Larger(ActionKind.FORWARD, 3, (1, "a")),
    parts=(Part(ActionKind.INPUT_BACKWARD), Part(ActionKind.FORWARD, 2)),
    names=["x", "y"],
    is_on=True,
    word="W",
    loss=math.inf,
)
PLAIN = json.loads(json.dumps(to_plain(WHOLE)))


@pytest.mark.parametrize("value", [WHOLE, replace(WHOLE, part=Part(ActionKind.FORWARD), word=None)])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_is_written_is_read_back(value: Whole, depth: int) -> None:
    text = json_lines(to_plain(value), depth)
    assert read_dataclass(Whole, json.loads(text)) == value
    assert text == json.dumps(json.loads(text)) or depth > 0


def test_objects_have_a_line_for_each_key_down_to_a_depth() -> None:
    assert json_lines({"a": {"b": {"c": 1}}, "d": {}}, 2) == (
        '{\n  "a": {\n    "b": {"c": 1}\n  },\n  "d": {}\n}'
    )


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"actions": 3}, "actions is 3; it must be an object"),
        ({"actions": {"3X5": {}}}, "a key of actions: '3X5' is not an action"),
        ({"actions": {"0F0": {"low": 1}}}, "actions.0F0 lacks high"),
        ({"actions": {"0F0": {"low": 1, "high": 0}}}, "actions.0F0.high is 0; it must be above 0"),
        (
            {"actions": {"0F0": {"low": 1, "high": math.inf}}},
            "actions.0F0.high is inf; it must be above 0 and finite",
        ),
        ({"by_stage": {"one": 1}}, "a key of by_stage is 'one'; it must be a whole number"),
        ({"by_stage": {"1": None}}, "by_stage.1 is None; it must be a number"),
        ({"part": 3}, "part is 3; it must be an object or null"),
        ({"part": {"kind": "X"}}, "part.kind is 'X'; known: F, B, I, W"),
        ({"part": {"kind": "F", "size": -1}}, "part.size is -1; it must be 0 or more"),
        ({"part": {"kind": "F", "size": 1, "more": [1]}}, "part.more is [1]; it must be a list of"),
        ({"part": {"kind": "F", "odd": 1}}, "part has unknown fields: odd"),
        ({"parts": {}}, "parts is {}; it must be a list"),
        ({"parts": [{}]}, "parts[0] lacks kind"),
        ({"names": ["x", "a\nb"]}, "names[1] is 'a\\nb'; it must be a text of one line"),
        ({"is_on": 1}, "is_on is 1; it must be true or false"),
        ({"word": "F"}, "word is 'F'; known: B, W"),
        ({"word": 3}, "word is 3; it must be a text of one line or null"),
        ({"loss": True}, "loss is True; it must be a number"),
        ({"loss": 10**400}, "loss is 1000"),
        ({"odd": 1, "also": 1}, "the whole has unknown fields: also, odd"),
    ],
)
def test_what_a_file_may_not_say_is_named(change: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(wrong)}"):
        read_dataclass(Whole, {**PLAIN, **change})


def test_fields_of_others_are_left_out_where_a_part_is_read() -> None:
    plain = {**PLAIN, "odd": 1}
    plain["parts"] = [{"kind": "F", "odd": 1}]
    read = read_dataclass(Whole, plain, partly=True)
    assert read == replace(WHOLE, parts=(Part(ActionKind.FORWARD),))


@pytest.mark.parametrize("value", [True, False, "1", None, [1], math.nan, math.inf, 10**400])
@pytest.mark.parametrize("hint", [Annotated[float, Within(-math.inf)], Number])
def test_what_is_no_finite_number_is_refused(hint: Any, value: Any) -> None:
    with pytest.raises(ValueError, match=r"^a\.b is .*; it must be "):
        read_as(hint, value, "a.b")
