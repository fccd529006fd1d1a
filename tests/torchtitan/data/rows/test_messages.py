"""Rows of every kind as messages, and who is learned of; broken ones are named by field."""

import json
from typing import Any

import pytest

from torchtitan.data.chat_template import ChatTemplateError
from torchtitan.data.rows.errors import FieldError
from torchtitan.data.rows.messages import (
    Conversation,
    Message,
    MessageReader,
    alpaca_messages,
    chat_messages,
    completion_messages,
    sharegpt_messages,
)
from torchtitan.data.sequences import PLAIN_TEMPLATE, Turn

ASK = {"role": "user", "content": "2 and 2?"}
SAY = {"role": "assistant", "content": "4"}
CALL = {
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 2, "b": 2}},
}
TOOL_TURNS = [
    ASK,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "4"},
    SAY,
]


def said(conversation: Conversation) -> list[tuple[str, str, bool]]:
    return [(m.role, m.content, m.is_answer) for m in conversation.messages]


def test_messages_of_roles_and_contents() -> None:
    row = {"messages": [{"role": "system", "content": "Be kind."}, ASK, SAY, ASK, SAY]}
    assert said(chat_messages(row)) == [
        ("system", "Be kind.", False),
        *[("user", "2 and 2?", False), ("assistant", "4", True)] * 2,
    ]


def test_either_list_takes_the_names_of_the_other() -> None:
    renamed = [{"from": "human", "value": "2 and 2?"}, {"from": "gpt", "value": "4"}]
    want = [("user", "2 and 2?", False), ("assistant", "4", True)]
    assert said(chat_messages({"messages": renamed})) == want
    assert said(sharegpt_messages({"conversations": [ASK, SAY]})) == want


@pytest.mark.parametrize(
    ("read", "row"),
    [
        (chat_messages, {"messages": [ASK, SAY]}),
        (sharegpt_messages, {"conversations": [ASK, SAY]}),
        (completion_messages, {"prompt": "2 and 2?", "completion": "4"}),
        (alpaca_messages, {"instruction": "2 and 2?", "output": "4"}),
    ],
)
def test_what_an_example_says_beside_its_messages(read: MessageReader, row: dict[str, Any]) -> None:
    schema = {"name": "add", "parameters": {"type": "object", "default": None}}
    beside = {"system": "Be kind.", "functions": [schema], "label": True, "images": []}
    found = read(row | beside)
    last = [("user", "2 and 2?", False), ("assistant", "4", True)]
    assert said(found) == [("system", "Be kind.", False), *last]
    assert found.tools == [{"type": "function", "function": schema}]
    assert read(row | {"functions": json.dumps([schema])}).tools == found.tools
    assert said(read(row | {"system": ""})) == said(read(row | {"system": None})) == last
    for name, value in {
        "chat_template_kwargs": {"enable_thinking": False},
        "label": False,
        "kto_tag": False,
        "images": ["cat.png"],
        "documents": [{"title": "a"}],
        "system": ["Be kind."],
    }.items():
        with pytest.raises(FieldError, match=f"field '{name}' is "):
            read(row | {name: value})
    with pytest.raises(FieldError, match="field 'functions' is there beside tools"):
        read(row | {"functions": [schema], "tools": [schema]})


def test_pictures_of_a_message_are_refused() -> None:
    with pytest.raises(
        FieldError, match=r"'messages\[0\]\.images' is .* rows here are texts alone"
    ):
        chat_messages({"messages": [{**ASK, "images": ["cat.png"]}, SAY]})


def test_a_system_prompt_stands_once() -> None:
    row = {"messages": [{"role": "system", "content": "Be kind."}, ASK, SAY]}
    assert said(chat_messages(row | {"system": "Be kind."})) == said(chat_messages(row))
    with pytest.raises(FieldError, match="'system' is there beside a message of another system"):
        chat_messages(row | {"system": "Be brief."})


def test_earlier_turns_of_alpaca_are_learned_too() -> None:
    row = {"instruction": "And 3?", "output": "6", "history": [["2 and 2?", "4"]]}
    earlier = [("user", "2 and 2?", False), ("assistant", "4", True)]
    last = [("user", "And 3?", False), ("assistant", "6", True)]
    assert said(alpaca_messages(row)) == earlier + last
    assert said(alpaca_messages(row | {"history": []})) == last
    for history, place in (("x", "history"), ([["a"]], "history"), ([["a", 1]], r"0\].1")):
        with pytest.raises(FieldError, match=place):
            alpaca_messages(row | {"history": history})


def test_a_prompt_and_its_completion() -> None:
    found = completion_messages({"prompt": "2 and 2?", "completion": "4"})
    assert said(found) == [("user", "2 and 2?", False), ("assistant", "4", True)]


def test_answers_in_a_prompt_of_messages_are_not_learned() -> None:
    found = completion_messages({"prompt": [ASK, SAY, ASK], "completion": [SAY]})
    assert said(found) == [
        ("user", "2 and 2?", False),
        ("assistant", "4", False),
        ("user", "2 and 2?", False),
        ("assistant", "4", True),
    ]
    assert PLAIN_TEMPLATE.mark(found)[1:3] == [
        Turn("assistant", "### Assistant:\n", False),
        Turn("assistant", "4", False, is_given=True),
    ]


def test_alpaca_without_an_input() -> None:
    whole = alpaca_messages({"instruction": "x", "input": "", "output": "y"})
    assert alpaca_messages({"instruction": "x", "output": "y"}) == whole
    assert alpaca_messages({"instruction": "x", "output": "y", "input": None}) == whole
    assert whole.messages[0] == Message("user", "x", "")


def test_calls_of_tools_and_what_they_return() -> None:
    found = chat_messages({"messages": TOOL_TURNS, "tools": [{"name": "add"}]})
    assert found.tools == [{"name": "add"}]
    assert said(found) == [
        ("user", "2 and 2?", False),
        ("assistant", "", True),
        ("tool", "4", False),
        ("assistant", "4", True),
    ]
    assert found.messages[1].others == {"tool_calls": [CALL]}
    assert found.messages[2].others == {"name": "add"}


def test_arguments_and_tools_as_texts_of_json_are_read() -> None:
    function = {"name": "add", "arguments": '{"a": 2, "b": 2}'}
    turns = [ASK, {"role": "assistant", "tool_calls": [{**CALL, "function": function}]}]
    found = chat_messages({"messages": turns, "tools": json.dumps([{"name": "add"}])})
    assert found.messages[1].others == {"tool_calls": [CALL]}
    assert found.tools == [{"name": "add"}]
    assert chat_messages({"messages": [ASK, SAY], "tools": ""}).tools == []


def test_fields_that_columnar_files_fill_up_with_nulls_are_not_there() -> None:
    row = {"messages": [{**ASK, "tool_calls": None, "name": None}, {**SAY, "tool_calls": None}]}
    assert all(not message.others for message in chat_messages(row).messages)


GOOD = {"instruction": "x", "input": "", "output": "y"}
ASKED, ANSWERED = {"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}
BROKEN = {
    alpaca_messages: [
        (GOOD | {"output": 3}, "output", "is a number; expected a string"),
        (GOOD | {"output": None}, "output", "is null; expected a string"),
        (GOOD | {"instruction": " "}, "instruction", "is empty; expected a text"),
        ({"instruction": "x", "input": ""}, "output", "is missing; expected a string"),
    ],
    sharegpt_messages: [
        ([ASKED], "conversations", "has no answer; expected a message from gpt or assistant"),
        (["hi"], "conversations[0]", "is a string; expected an object with from, value"),
        ([ASKED, {"value": "y"}], "conversations[1].from", "is missing; expected a string"),
        ([{**ANSWERED, "from": True}], "conversations[0].from", "is a truth value; expected a st"),
        ([{**ANSWERED, "from": "bing"}], "conversations[0].from", "is 'bing'; expected one of ["),
    ],
    chat_messages: [
        ({}, "messages", "is null; expected a list of messages"),
        ([], "messages", "is empty; expected at least one message"),
        ([ASK], "messages", "has no answer; expected a message from assistant"),
        ([SAY, 3], "messages[1]", "is a number; expected an object with role, content"),
        ([{"content": "x"}], "messages[0].role", "is missing; expected a string"),
        ([{"role": "x"}], "messages[0].role", "is 'x'; expected one of ["),
        ([{"role": "user"}], "messages[0].content", "is missing; expected a string"),
        ([{**ASK, "content": 3}], "messages[0].content", "is a number; expected a string"),
        ([{**SAY, "tool_calls": "x"}], "messages[0].tool_calls", "is no list of objects; expected"),
        (
            [{**SAY, "tool_calls": [{"function": {"arguments": "{"}}]}],
            "messages[0].tool_calls.function.arguments",
            "is a text that is no JSON (",
        ),
        ({"messages": [ASK, SAY], "tools": {"a": 1}}, "tools", "is an object; expected a list of"),
    ],
    completion_messages: [
        ({"prompt": 3, "completion": "y"}, "prompt", "is a number; expected a string"),
        ({"prompt": "x"}, "completion", "is missing; expected a string"),
        ({"prompt": [ASK], "completion": [ASK]}, "completion", "has no answer; expected a message"),
        ({"prompt": [], "completion": "y"}, "prompt", "is empty; expected at least one message"),
    ],
}


@pytest.mark.parametrize(
    ("read", "row", "field", "text"),
    [(read, *case) for read, cases in BROKEN.items() for case in cases],
)
def test_broken_rows(read: MessageReader, row: Any, field: str, text: str) -> None:
    if isinstance(row, list):
        row = {"conversations" if read is sharegpt_messages else "messages": row}
    with pytest.raises(FieldError) as info:
        read(row)
    assert info.value.field == field
    assert info.value.problem.startswith(text)


def test_tools_are_not_left_out_in_silence() -> None:
    for row, word in (
        ({"messages": TOOL_TURNS}, "tool_calls"),
        ({"messages": [ASK, SAY], "tools": [{}]}, "tools"),
    ):
        with pytest.raises(ChatTemplateError, match=f"'plain' has no words for {word}, which"):
            PLAIN_TEMPLATE.mark(chat_messages(row))


def test_a_field_that_is_empty_is_not_there() -> None:
    empty = {"tool_calls": [], "name": "", "audio": {}, "refusal": None}
    found = chat_messages({"messages": [{**ASK, **empty}, {**SAY, **empty}], "tools": {}})
    assert found == chat_messages({"messages": [ASK, SAY]})
    call = {"function": {"name": "now", "arguments": ""}}
    (message,) = chat_messages({"messages": [{"role": "assistant", "tool_calls": [call]}]}).messages
    assert message.others["tool_calls"][0]["function"]["arguments"] == {}


def test_roles_that_others_have() -> None:
    call = {"name": "add", "arguments": {"a": 2, "b": 2}}
    rows = [
        {"from": "developer", "value": "Be kind."},
        {"from": "human", "value": "2 and 2?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "4"},
    ]
    found = sharegpt_messages({"conversations": rows})
    assert [message.role for message in found.messages] == [
        *("system", "user", "assistant", "tool", "assistant")
    ]
    assert found.messages[2] == Message("assistant", "", others={"tool_calls": [CALL]})
    legacy = {"role": "assistant", "content": None, "function_call": {**call, "arguments": "{}"}}
    (message, _) = chat_messages({"messages": [legacy, {**SAY, "role": "function"}]}).messages
    assert message.others["tool_calls"][0]["function"] == {"name": "add", "arguments": {}}
    rows[2]["value"] = "no JSON"
    with pytest.raises(FieldError, match=r"conversations\[2\]\.value' is a text that is no JSON"):
        sharegpt_messages({"conversations": rows})
    rows[2]["value"] = "[1]"
    with pytest.raises(FieldError, match=r"conversations\[2\]\.value' is no call of a tool; expec"):
        sharegpt_messages({"conversations": rows})


def test_content_in_parts_of_text_is_their_text() -> None:
    parts = [{"type": "text", "text": "2 and"}, {"type": "text", "text": " 2?", "image_url": None}]
    row = {"messages": [{"role": "user", "content": parts}, SAY]}
    assert chat_messages(row) == chat_messages({"messages": [ASK, SAY]})
    parts[1] = {"type": "image_url"}
    with pytest.raises(FieldError, match=r"content\[1\]' is 'image_url'; expected a part of type"):
        chat_messages(row)


@pytest.mark.parametrize(
    ("switch", "learned"),
    [
        *[({name: True}, True) for name in ("train", "training", "loss", "weight")],
        *[({name: value}, False) for name in ("train", "loss", "weight") for value in (0, 0.0)],
        ({"masked": True}, False),
        ({"masked": False}, True),
        ({"train": True, "weight": 0}, False),
        ({"train": None}, True),
    ],
)
def test_a_message_that_is_switched_off_is_read_and_not_learned(
    switch: dict[str, Any], learned: bool
) -> None:
    found = chat_messages({"messages": [ASK, {**SAY, **switch}, ASK, SAY]})
    assert [message.is_answer for message in found.messages] == [False, learned, False, True]
    assert not found.messages[1].others


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({**SAY, "weight": 0.5}, "weight' is 0.5; expected true or false, 1 or 0"),
        ({**SAY, "train": "yes"}, "train' is 'yes'; expected true or false"),
        ({**ASK, "train": True}, "train' has the message of a user learned; only answers are"),
        ({**ASK, "masked": False}, "masked' has the message of a user learned"),
        ({**SAY, "train_detail": [1]}, "train_detail' has parts of a message learned"),
    ],
)
def test_a_switch_that_cannot_be_honoured_is_refused(message: dict[str, Any], text: str) -> None:
    with pytest.raises(FieldError) as error:
        chat_messages({"messages": [message, SAY]})
    assert text in str(error.value)


def test_a_key_that_a_text_has_twice_is_refused() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": 1, "a": 2}'}}
    with pytest.raises(FieldError, match="an object has the key 'a' twice"):
        chat_messages({"messages": [{"role": "assistant", "tool_calls": [call]}]})
