"""What is said in an example of instruction data: messages, before a template makes a text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torchtitan.data.rows.errors import FieldError, kind_of

ASSISTANT = "assistant"
SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "model": ASSISTANT,
    "chatgpt": ASSISTANT,
    "tool": "tool",
}
# What messages and their example are read for, each by a template that has words for it.
TOOL_CALLS, TOOLS = "tool_calls", "tools"
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Message(NamedTuple):
    """One message of a conversation.

    Args:
        role: "system", "user", "assistant" or "tool"; what an assistant says is learned.
        content: What is said.
        context: What an instruction is about, where an example keeps that apart (Alpaca's
            ``input``); empty for an instruction about nothing, None for what is no instruction.
        others: What else a message has, for templates that ask for it, such as ``tool_calls``.
        is_given: Whether an assistant's message is part of a prompt, and so not learned.
    """

    role: str
    content: str
    context: str | None = None
    others: Mapping[str, Any] = _NOTHING
    is_given: bool = False

    @property
    def is_answer(self) -> bool:
        """Whether this is learned."""
        return self.role == ASSISTANT and not self.is_given


class Conversation(NamedTuple):
    """An example: its messages, and the tools that may be called in them.

    Args:
        messages: In order.
        tools: Descriptions of the tools, JSON schemas by convention.
    """

    messages: Sequence[Message]
    tools: Sequence[Any] = ()


MessageReader = Callable[[dict[str, Any]], Conversation]


def alpaca_messages(example: dict[str, Any]) -> Conversation:
    """Read ``{instruction, input, output}`` as a question and its answer.

    An input that is only blanks, or missing, is none.

    Raises:
        FieldError: If a field is missing or no string, or the instruction is empty.
    """
    given = {"input": "", **example}
    instruction, source, output = (_text(given, f) for f in ("instruction", "input", "output"))
    if not instruction.strip():
        raise FieldError("instruction", "is empty; expected a text")
    context = source if source.strip() else ""
    return Conversation([Message("user", instruction, context), Message(ASSISTANT, output)])


def sharegpt_messages(example: dict[str, Any]) -> Conversation:
    """Read ``{conversations: [{from, value}, ...]}``; see :func:`chat_messages`."""
    return _conversation(example, "conversations", ("from", "value"))


def chat_messages(example: dict[str, Any]) -> Conversation:
    """Read ``{messages: [{role, content}, ...]}``, with ``tools`` where the example has them.

    A message may have other fields too, and one with ``tool_calls`` needs no content. Messages of
    ``{from, value}`` are taken as well.

    Raises:
        FieldError: If there are no messages or no answer, a field is missing or of a wrong type, or
            a speaker is unknown.
    """
    return _conversation(example, "messages", ("role", "content"))


def completion_messages(example: dict[str, Any]) -> Conversation:
    """Read ``{prompt, completion}``: texts, or lists of messages as TRL has them.

    Only answers of the completion are learned.

    Raises:
        FieldError: As in :func:`chat_messages`, or if the completion has no answer.
    """
    prompt, completion = (
        _messages(example.get(field), field, ("role", "content"))
        if isinstance(example.get(field), list)
        else [Message(role, _text(example, field))]
        for field, role in (("prompt", "user"), ("completion", ASSISTANT))
    )
    _require_answer(completion, "completion")
    given = [message._replace(is_given=True) for message in prompt]
    return Conversation([*given, *completion], _tools(example))


def _conversation(example: dict[str, Any], field: str, keys: tuple[str, str]) -> Conversation:
    messages = _messages(example.get(field), field, keys)
    _require_answer(messages, field)
    return Conversation(messages, _tools(example))


def _messages(entries: Any, field: str, keys: tuple[str, str]) -> list[Message]:
    """Return the messages of a list whose entries name the speaker and what is said by ``keys``."""
    if not isinstance(entries, list):
        raise FieldError(field, f"is {kind_of(entries)}; expected a list of messages")
    if not entries:
        raise FieldError(field, "is empty; expected at least one message")
    return [_message(entry, f"{field}[{i}]", keys) for i, entry in enumerate(entries)]


def _message(entry: Any, place: str, keys: tuple[str, str]) -> Message:
    if not isinstance(entry, dict):
        expected = f"an object with {', '.join(keys)}"
        raise FieldError(place, f"is {kind_of(entry)}; expected {expected}")
    keys = next((pair for pair in (keys, *_KEYS) if pair[0] in entry), keys)
    # Columnar files give every message each field that one of them has.
    others = {key: value for key, value in entry.items() if key not in keys and value is not None}
    speaker = _text(entry, keys[0], place)
    if speaker not in SPEAKERS:
        problem = f"is {speaker!r}; expected one of {list(SPEAKERS)}"
        raise FieldError(f"{place}.{keys[0]}", problem)
    if TOOL_CALLS in others:
        others[TOOL_CALLS] = _tool_calls(others[TOOL_CALLS], f"{place}.{TOOL_CALLS}")
        entry = {**entry, keys[1]: entry.get(keys[1]) or ""}
    return Message(SPEAKERS[speaker], _text(entry, keys[1], place), others=others)


_KEYS = (("role", "content"), ("from", "value"))


def _tool_calls(calls: Any, place: str) -> list[Any]:
    """Return the calls; arguments that are JSON as a text, as OpenAI has them, are read."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise FieldError(place, "is no list of objects; expected the calls of a message")
    found = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            arguments = _json(function["arguments"], f"{place}.function.arguments")
            call = {**call, "function": {**function, "arguments": arguments}}
        found.append(call)
    return found


def _tools(example: dict[str, Any]) -> list[Any]:
    tools = example.get(TOOLS)
    if isinstance(tools, str):
        tools = _json(tools, TOOLS) if tools.strip() else []
    if tools is not None and not isinstance(tools, list):
        raise FieldError(TOOLS, f"is {kind_of(tools)}; expected a list of tools, or its JSON")
    return tools or []


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FieldError(place, f"is a text that is no JSON ({error})") from error


def _require_answer(messages: Sequence[Message], field: str) -> None:
    if not any(message.is_answer for message in messages):
        who = "gpt or assistant" if field == "conversations" else ASSISTANT
        raise FieldError(field, f"has no answer; expected a message from {who}")


def _text(example: dict[str, Any], field: str, place: str = "") -> str:
    name = f"{place}.{field}" if place else field
    if field not in example:
        raise FieldError(name, "is missing; expected a string")
    if not isinstance(example[field], str):
        raise FieldError(name, f"is {kind_of(example[field])}; expected a string")
    text: str = example[field]
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can hold "\\ud83d", of which no tokens can be made
        half = text[error.start]
        raise FieldError(name, f"has {half!r}, half of a character; expected a text") from error
    return text
