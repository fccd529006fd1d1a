"""What is said in an example of instruction data: messages, before a template makes a text."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torchtitan.data.examples import FieldError, InstructExamples, kind_of

SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
}


class Message(NamedTuple):
    """One message of a conversation.

    Args:
        role: "system", "user" or "assistant"; what an assistant says is learned.
        content: What is said.
        context: What an instruction is about, where an example keeps that apart (Alpaca's
            ``input``).
    """

    role: str
    content: str
    context: str = ""


MessageReader = Callable[[dict[str, Any]], list[Message]]


def alpaca_messages(example: dict[str, Any]) -> list[Message]:
    """Read ``{instruction, input, output}`` as a question and its answer.

    An input that is only blanks is none.

    Raises:
        FieldError: If a field is missing or no string, or the instruction is empty.
    """
    instruction, source, output = (_text(example, f) for f in ("instruction", "input", "output"))
    if not instruction.strip():
        raise FieldError("instruction", "is empty; expected a text")
    context = source if source.strip() else ""
    return [Message("user", instruction, context), Message("assistant", output)]


def sharegpt_messages(example: dict[str, Any]) -> list[Message]:
    """Read ``{conversations: [{from, value}, ...]}``.

    Raises:
        FieldError: If the conversation is empty or has no answer, a field is missing or of a wrong
            type, or a speaker is unknown.
    """
    entries = example.get("conversations")
    if not isinstance(entries, list):
        raise FieldError("conversations", f"is {kind_of(entries)}; expected a list of messages")
    if not entries:
        raise FieldError("conversations", "is empty; expected at least one message")
    messages = []
    for i, entry in enumerate(entries):
        place = f"conversations[{i}]"
        if not isinstance(entry, dict):
            raise FieldError(place, f"is {kind_of(entry)}; expected an object with from, value")
        speaker, value = _text(entry, "from", place), _text(entry, "value", place)
        if speaker not in SPEAKERS:
            raise FieldError(f"{place}.from", f"is {speaker!r}; expected one of {list(SPEAKERS)}")
        messages.append(Message(SPEAKERS[speaker], value))
    if not any(message.role == "assistant" for message in messages):
        raise FieldError("conversations", "has no answer; expected a message from gpt or assistant")
    return messages


def require_messages(examples: InstructExamples, reader: MessageReader) -> None:
    """Check that each of ``examples`` can be read.

    Raises:
        DataExampleError: Naming the place and the field of the first that cannot.
    """
    for index in range(len(examples)):
        examples.read(index, reader)


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
