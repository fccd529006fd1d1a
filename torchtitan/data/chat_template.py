"""Chat templates: from the messages of a conversation to the model's text.

A template is a Jinja program, as in a tokenizer's folder of transformers, run in a limited process
    (``torchtitan.data.text.renderer``) with transformers' variables: ``messages``,
``add_generation_prompt``, the tokenizer's special tokens, ``tools`` and ``raise_exception``. Two
things differ. There are no documents. And there is no ``strftime_now``: today's date would change
    examples from day to day, so templates with a fallback (Llama 3.1 and 3.2) write their own date.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer
from torchtitan.tools.logging import logger

from timelyfreeze.files import read_object, shown
from torchtitan.data.rows.messages import (
    ASSISTANT,
    THOUGHTS,
    TOOL_CALLS,
    TOOLS,
    Conversation,
    Message,
)
from torchtitan.data.text.renderer import Rendered, RenderError, render
from torchtitan.data.text.tokenizer import CONFIG_FILE

TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"


class ChatTemplateError(ValueError):
    """A template is missing or broken, or cannot render a conversation."""


class ChatText(NamedTuple):
    """A rendered conversation, and the characters ``[start, end)`` of answers with their ends."""

    text: str
    answers: tuple[tuple[int, int], ...]


class ChatTemplate:
    """A chat template together with the special tokens of a tokenizer, by name.

    With ``reads_context`` the template puts ``message.context`` into words; without, the context
    follows the content after a blank line. ``for_tools`` is the program for conversations with
    tools, if different. A source other than a Jinja program is refused at once.
    """

    def __init__(
        self,
        name: str,
        source: str,
        tokens: Mapping[str, str],
        *,
        reads_context: bool = False,
        for_tools: str | None = None,
    ) -> None:
        self.name = name
        self._source, self._for_tools = source, for_tools or source
        self._tokens = dict(tokens)
        self._reads_context = reads_context
        for program in {self._source, self._for_tools}:
            self._rendered(program, None)

    def mark(self, said: Conversation) -> ChatText:
        """Render a conversation and find its answers in the text.

        Generation blocks of a template mark its answers. Elsewhere the text before an answer is the
        earlier messages with the generation prompt, as at inference; the added text is learned, but
        for blanks at its end. A template may change an answer once messages follow (Qwen3 drops its
        thoughts): changed answers are read, not learned, since the model never writes them so.
        ChatTemplateError if no answer is left.
        """
        messages, program = said.messages, self._program(said)
        require_words(self.name, program, said)
        places = [i for i, message in enumerate(messages) if message.is_answer]
        text, marked, spans = self._rendered(program, said, answers=places)
        try:
            text.encode()
        except UnicodeEncodeError as error:  # contents are checked, other fields are not
            raise ChatTemplateError(f"its text has half of a character ({error})") from error
        speaking = [message for message in messages if message.role == ASSISTANT]
        if marked and len(marked) == len(speaking):
            own = zip(marked, speaking, strict=True)
            return ChatText(text, tuple((s, e) for (s, e), m in own if m.is_answer))
        answers = tuple((span[0], span[1]) for span in spans if span is not None)
        if places and not answers:
            raise ChatTemplateError(
                f"the chat template {self.name!r} writes no answer as it would be written at "
                "inference, such as after a '<think>' of its prompt, so what to learn cannot be "
                "told; write {% generation %} and {% endgeneration %} around answers in "
                f"{TEMPLATE_FILE} of model.hf_assets_path, which says what is learned, or set "
                "data.chat_template to another one"
            )
        if len(answers) < len(places):
            _tell_once(self.name)
        return ChatText(text, answers)

    def _program(self, said: Conversation) -> str:
        return self._for_tools if said.tools else self._source

    def _rendered(self, program: str, said: Conversation | None, **asked: Any) -> Rendered:
        messages = None if said is None else [self._as_dict(message) for message in said.messages]
        tools = () if said is None else said.tools
        try:
            return render(program, self._tokens, messages, tools, **asked)
        except RenderError as error:
            told = f"{self.name!r}{error}" if error.is_broken else f"{self.name!r} refuses: {error}"
            the = "" if error.is_broken else "the "
            raise ChatTemplateError(f"{the}chat template {told}") from error

    def tokens(self, said: Conversation, tokenizer: BaseTokenizer) -> tuple[list[int], list[bool]]:
        """Return the tokens of a conversation, and the learned among them.

        The text is encoded as a whole, as transformers does, so that a tokenizer with special
        treatment of a text's beginning meets a single beginning. No token is added. Learned are
        tokens beginning within an answer or its end mark.
        """
        assert isinstance(tokenizer, HuggingFaceTokenizer)  # which the template is of
        chat = self.mark(said)
        encoding = tokenizer.tokenizer.encode(chat.text, add_special_tokens=False)
        ids, offsets = encoding.ids, encoding.offsets  # lists made again at each access
        learned = [False] * len(ids)
        token = 0
        for start, end in chat.answers:
            for place in range(token, len(learned)):
                first, last = offsets[place]
                if first >= end:
                    break
                token = place + 1
                # The second rule is for blanks before the answer: tokenizers that trim offsets
                # leave such a token with none of its characters, where the answer starts.
                learned[place] = first >= start and last > start
        return ids, learned

    def end_of_answer(self) -> str:
        """Return the learned text behind an answer; empty without an end mark."""
        question = [Message("user", "question"), Message("assistant", "answer")]
        chat = self.mark(Conversation(question))
        ((start, end),) = chat.answers
        return chat.text[start:end].partition("answer")[2]

    def _as_dict(self, message: Message) -> dict[str, Any]:
        fields = {**message.others, "role": message.role, "content": message.content}
        thought = next((fields[name] for name in THOUGHTS if name in fields), None)
        if thought is not None:  # as transformers has it
            fields = {"thinking": thought, **fields, "reasoning_content": thought}
        if self._reads_context:
            return fields | {"context": message.context or ""}
        if message.context:
            fields["content"] += f"\n\n{message.context}"
        return fields


@lru_cache
def _tell_once(name: str) -> None:
    logger.warning(
        f"The chat template {name!r} writes answers otherwise once messages follow; in "
        "conversations of several turns these are read and not learned (timelyfreeze samples shows "
        "which), unless the template marks answers by generation blocks"
    )


def require_words(name: str, source: str, said: Conversation) -> None:
    """Refuse a conversation with tools or thoughts unknown to the template."""
    there = {field for message in said.messages for field in message.others}
    there |= {TOOLS} if said.tools else set()
    for words in ((TOOL_CALLS,), (TOOLS,), THOUGHTS):
        if not there.isdisjoint(words) and not any(word in source for word in words):
            raise ChatTemplateError(
                f"the chat template {name!r} has no words for {words[0]}, which the example has; "
                'set data.chat_template to one that has, such as "tokenizer" of a model tuned for '
                "them"
            )


def template_in_folder(folder: str | Path, name: str = "default") -> str | None:
    """Return the source of a tokenizer's chat template, from transformers' places, or None."""
    found = _templates_in_folder(Path(folder))
    if found and "default" not in found:
        raise ChatTemplateError(
            f"{Path(folder) / CONFIG_FILE}: chat_template has the templates {shown(list(found))}; "
            "one must be named 'default'"
        )
    return found.get(name)


def _templates_in_folder(folder: Path) -> dict[str, str]:
    files = {file.stem: file for file in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    if (folder / TEMPLATE_FILE).is_file():
        files["default"] = folder / TEMPLATE_FILE
    found: dict[str, str] = {}
    for name, file in files.items():
        try:
            found[name] = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ChatTemplateError(f"{file} cannot be read: {error}") from error
    if found:
        return found
    config = folder / CONFIG_FILE
    try:
        entry = read_object(config).get("chat_template")
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ChatTemplateError(f"{config.parent}/{error}") from error
    if entry is None or isinstance(entry, str):
        return {} if entry is None else {"default": entry}
    if isinstance(entry, list) and all(isinstance(each, dict) for each in entry):
        named = {str(each.get("name")): each.get("template") for each in entry}
        return {name: source for name, source in named.items() if isinstance(source, str)}
    raise ChatTemplateError(
        f"{config}: chat_template is of type {type(entry).__name__}; expected a text or a list"
    )
