"""Content of an example of instruction data: messages, before a template makes a text."""

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from timelyfreeze.files import shown
from torchtitan.data.rows.errors import FieldError, kind_of


def parse_value(text: str) -> Any:
    """Return the value of a JSON text; ValueError for other texts or repeated keys."""
    return json.loads(text, object_pairs_hook=_said_once)


def _said_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has the key {twice!r} twice")
    return found


def without_nulls(value: Any) -> Any:
    """Return a value without nulls in objects, put there by columnar files."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


ASSISTANT = "assistant"
# These say nothing but a call, as JSON; the latter is a field of messages too.
_CALLERS = ("tool_call", "function_call")
SPEAKERS = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt"), ASSISTANT),
    **dict.fromkeys(("tool", "tool_response", "function", "observation"), "tool"),
    **dict.fromkeys(_CALLERS, ASSISTANT),
}
# By which other trainers say of a message whether it is learned, and what stands for yes.
_SWITCHES = {"train": True, "training": True, "loss": True, "weight": True, "masked": False}
# What messages and their example are read for, each by a template that has words for it.
TOOL_CALLS, TOOLS = "tool_calls", "tools"
# What else an example of any kind may say beside its messages, and what is refused, there too.
SYSTEM, FUNCTIONS, HISTORY = "system", "functions", "history"
_LABELS = ("label", "kto_tag")  # of an answer: whether it is a good one
_REFUSED = {
    **dict.fromkeys(_LABELS, "it marks a bad answer"),
    "chat_template_kwargs": "templates get no values of their own here",
    **dict.fromkeys(("images", "videos", "audios"), "rows here are texts alone"),
    "documents": "templates get none here",
}
BESIDE = (TOOLS, FUNCTIONS, SYSTEM, *_REFUSED)
_EMPTY: tuple[Any, ...] = (None, "", [], {})
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names of one field
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Message(NamedTuple):
    """A message of a conversation.

    ``context`` is the subject of an instruction, if separate in the example (Alpaca's ``input``);
    empty for an instruction without, None for other messages. ``others`` are further fields for
    templates, such as ``tool_calls``. An assistant's message is learned unless it ``is_given``, as
    part of a prompt or by its own field.
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
    """An example: its messages, and the tools, JSON schemas by convention, to call in them."""

    messages: Sequence[Message]
    tools: Sequence[Any] = ()


MessageReader = Callable[[dict[str, Any]], Conversation]


def alpaca_messages(example: dict[str, Any]) -> Conversation:
    """Read ``{instruction, input, output}``, with earlier turns as pairs in ``history``.

    A blank or null input counts as missing.
    """
    given = example if example.get("input") is not None else {**example, "input": ""}
    instruction, source, output = (_text(given, f) for f in ("instruction", "input", "output"))
    if not instruction.strip():
        raise FieldError("instruction", "is empty; expected a text")
    context = source if source.strip() else ""
    last = [Message("user", instruction, context), Message(ASSISTANT, output)]
    return _said(example, [*_earlier(example.get(HISTORY)), *last])


def _earlier(history: Any) -> list[Message]:
    turns = [] if history in _EMPTY else history
    if not isinstance(turns, list) or any(not isinstance(t, list) or len(t) != 2 for t in turns):
        raise FieldError(HISTORY, "is no list of pairs of an instruction and its answer")
    found = []
    for i, turn in enumerate(turns):
        question, answer = (_text({str(k): turn[k]}, str(k), f"{HISTORY}[{i}]") for k in (0, 1))
        found += [Message("user", question, ""), Message(ASSISTANT, answer)]
    return found


def sharegpt_messages(example: dict[str, Any]) -> Conversation:
    """Read ``{conversations: [{from, value}, ...]}``; see :func:`chat_messages`."""
    return _conversation(example, "conversations", ("from", "value"))


def chat_messages(example: dict[str, Any]) -> Conversation:
    """Read ``{messages: [{role, content}, ...]}``, with ``tools`` where the example has them.

    A message may have other fields too, and needs no content beside ``tool_calls``. Empty fields
    count as missing. Messages of ``{from, value}`` are taken as well, and content in parts.
    """
    return _conversation(example, "messages", ("role", "content"))


def completion_messages(example: dict[str, Any]) -> Conversation:
    """Read ``{prompt, completion}``, texts or lists of messages; the completion is learned."""
    prompt, completion = (
        _messages(example.get(field), field, ("role", "content"))
        if isinstance(example.get(field), list)
        else [Message(role, _text(example, field))]
        for field, role in (("prompt", "user"), ("completion", ASSISTANT))
    )
    _require_answer(completion, "completion")
    given = [message._replace(is_given=True) for message in prompt]
    return _said(example, [*given, *completion])


def _conversation(example: dict[str, Any], field: str, keys: tuple[str, str]) -> Conversation:
    messages = _messages(example.get(field), field, keys)
    _require_answer(messages, field)
    return _said(example, messages)


def _said(example: dict[str, Any], messages: list[Message]) -> Conversation:
    """Return messages with the example's other columns."""
    _refuse(example)
    system = "" if example.get(SYSTEM) in _EMPTY else _text(example, SYSTEM)
    if system.strip():
        own = [message.content for message in messages if message.role == "system"]
        if own and own != [system]:
            raise FieldError(SYSTEM, "is there beside a message of another system; keep one")
        messages = messages if own else [Message("system", system), *messages]
    tools = _tools(example, TOOLS)
    functions = [{"type": "function", "function": f} for f in _tools(example, FUNCTIONS)]
    if tools and functions:
        raise FieldError(FUNCTIONS, f"is there beside {TOOLS}; keep one of them")
    return Conversation(messages, tools or functions)


def _messages(entries: Any, field: str, keys: tuple[str, str]) -> list[Message]:
    """Return the messages of a list whose entries have speaker and text under ``keys``."""
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
    others = {key: value for key, value in entry.items() if key not in keys and value not in _EMPTY}
    speaker = _text(entry, keys[0], place)
    if speaker not in SPEAKERS:
        problem = f"is {speaker!r}; expected one of {list(SPEAKERS)}"
        raise FieldError(f"{place}.{keys[0]}", problem)
    _refuse(others, f"{place}.")
    is_given = not _is_learned(others, place, SPEAKERS[speaker])
    content = entry.get(keys[1])
    if speaker in _CALLERS:
        others[TOOL_CALLS], content = _called(content, f"{place}.{keys[1]}"), ""
    elif _CALLERS[1] in others:
        others[TOOL_CALLS] = _called(others.pop(_CALLERS[1]), f"{place}.{_CALLERS[1]}")
    if TOOL_CALLS in others:
        others[TOOL_CALLS] = _tool_calls(others[TOOL_CALLS], f"{place}.{TOOL_CALLS}")
        content = content or ""
    if isinstance(content, list):
        content = _joined(content, f"{place}.{keys[1]}")
    if keys[1] in entry or content is not None:
        entry = {**entry, keys[1]: content}
    text = _text(entry, keys[1], place)
    return Message(SPEAKERS[speaker], text, others=others, is_given=is_given)


def _refuse(said: dict[str, Any], place: str = "") -> None:
    for name, why in _REFUSED.items():
        value = said.get(name)
        if value is False if name in _LABELS else value not in _EMPTY:
            raise FieldError(f"{place}{name}", f"is {shown(value)}; {why}, so leave it out")


def _is_learned(others: dict[str, Any], place: str, role: str) -> bool:
    """Take the switches out of a message's fields; return whether all of them are on."""
    values = {name: others.pop(name) for name in _SWITCHES if name in others}
    on = {name for name, value in values.items() if value == _SWITCHES[name]}
    for name, value in values.items():
        field = f"{place}.{name}"
        if value not in (0, 1):  # which are False and True too
            raise FieldError(field, f"is {shown(value)}; expected true or false, 1 or 0")
        if name in on and role != ASSISTANT:
            raise FieldError(field, f"has the message of a {role} learned; only answers are")
    if "train_detail" in others:
        problem = "has parts of a message learned; expected whole answers"
        raise FieldError(f"{place}.train_detail", problem)
    return len(on) == len(values)


def _joined(parts: Sequence[Any], place: str) -> str:
    """Return the text of content in parts, as ``{"type": "text", "text": ...}``."""
    for i, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else kind_of(part)
            raise FieldError(f"{place}[{i}]", f"is {shown(kind)}; expected a part of type 'text'")
    return "".join(_text(part, "text", f"{place}[{i}]") for i, part in enumerate(parts))


_KEYS = (("role", "content"), ("from", "value"))


def _called(said: Any, place: str) -> list[Any]:
    """Return the calls of ``{name, arguments}``, alone or in a list, or the JSON of these."""
    calls = _json(said, place) if isinstance(said, str) else said
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(c, dict) and isinstance(c.get("name"), str) for c in calls):
        raise FieldError(place, "is no call of a tool; expected the JSON of {name, arguments}")
    return [{"type": "function", "function": call} for call in calls]


def _tool_calls(calls: Any, place: str) -> list[Any]:
    """Return the calls, with arguments given as JSON text, as OpenAI's, parsed."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise FieldError(place, "is no list of objects; expected the calls of a message")
    found = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            text = function["arguments"]
            arguments = _json(text, f"{place}.function.arguments") if text.strip() else {}
            call = {**call, "function": {**function, "arguments": arguments}}
        found.append(call)
    return found


def _tools(example: dict[str, Any], field: str) -> list[Any]:
    tools = example.get(field)
    if isinstance(tools, str):
        tools = _json(tools, field) if tools.strip() else []
    if tools and not isinstance(tools, list):
        raise FieldError(field, f"is {kind_of(tools)}; expected a list of tools, or its JSON")
    return tools or []


def _json(text: str, place: str) -> Any:
    try:
        return parse_value(text)
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
