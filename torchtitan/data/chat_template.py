"""Chat templates: from the messages of a conversation to the text that a model reads.

A template is a Jinja program, as transformers keeps it in a tokenizer's folder, and is run in
Jinja's sandbox with what transformers gives it: ``messages``, ``add_generation_prompt``, the
tokenizer's special tokens, ``tools`` and ``raise_exception``. Two things differ. There are no
documents. And there is no ``strftime_now``: examples that carry today's date would differ from one
day to the next, so templates that ask whether it exists (Llama 3.1 and 3.2) write their own date.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from timelyfreeze.files import read_object, shown
from torchtitan.data.rows.messages import TOOL_CALLS, TOOLS, Conversation, Message
from torchtitan.data.text.tokenizer import CONFIG_FILE

TEMPLATE_FILE = "chat_template.jinja"


class ChatTemplateError(ValueError):
    """A template is missing or broken, or cannot render a conversation."""


class ChatText(NamedTuple):
    """A rendered conversation.

    Args:
        text: What the model reads.
        answers: For each answer the characters ``[start, end)`` of ``text`` that are learned: the
            answer and the mark that ends it.
    """

    text: str
    answers: tuple[tuple[int, int], ...]


class ChatTemplate:
    """A chat template together with the special tokens of a tokenizer.

    Args:
        name: What messages call it.
        source: The Jinja program.
        tokens: The tokenizer's special tokens, such as ``{"bos_token": "<s>"}``.
        reads_context: Whether the template puts ``message.context`` into words. For one that does
            not, the context follows the content after a blank line.

    Raises:
        ChatTemplateError: If ``source`` is no Jinja program.
    """

    def __init__(
        self, name: str, source: str, tokens: Mapping[str, str], *, reads_context: bool = False
    ) -> None:
        self.name = name
        self._source = source
        self._tokens = dict(tokens)
        self._reads_context = reads_context
        try:
            _compiled(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"chat template {name!r}, line {error.lineno}: {error.message}"
            ) from error
        except (jinja2.TemplateError, RecursionError, ValueError) as error:
            raise ChatTemplateError(f"chat template {name!r}: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the text of ``messages``.

        Args:
            messages: Of a conversation.
            tools: That may be called in it.
            add_generation_prompt: End with what stands before an answer.

        Raises:
            ChatTemplateError: If the template refuses the conversation, or fails.
        """
        try:
            return _compiled(self._source).render(
                messages=[self._as_dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=list(tools) or None,
                documents=None,
                **self._tokens,
            )
        except Exception as error:  # a program of somebody's, which can fail in any way
            raise ChatTemplateError(f"the chat template {self.name!r} refuses: {error}") from error

    def mark(self, said: Conversation) -> ChatText:
        """Render a conversation and find its answers in the text.

        The text before an answer is that of the messages before it with the generation prompt, as
        at inference; what the answer adds is learned, but for blanks at its end.

        Raises:
            ChatTemplateError: As in :meth:`render`, if the template has no words for tools that the
                conversation has, or if its text does not begin with the text of its first messages,
                so that answers cannot be told from prompts.
        """
        messages, tools = said
        require_words(self.name, self._source, said)
        text = self.render(messages, tools)
        try:
            text.encode()
        except UnicodeEncodeError as error:  # contents are checked, other fields are not
            raise ChatTemplateError(f"its text has half of a character ({error})") from error
        answers = []
        for i, message in enumerate(messages):
            if not message.is_answer:
                continue
            before = self.render(messages[:i], tools, add_generation_prompt=True)
            until = self.render(messages[: i + 1], tools)
            if not (until.startswith(before) and text.startswith(until)):
                raise ChatTemplateError(
                    f"the chat template {self.name!r} writes the messages up to answer "
                    f"{len(answers) + 1} differently when more follow, so what to learn cannot be "
                    "told; set data.chat_template to another one"
                )
            answers.append((len(before), max(len(before), len(until.rstrip()))))
        return ChatText(text, tuple(answers))

    def tokens(
        self, said: Conversation, tokenizer: HuggingFaceTokenizer
    ) -> tuple[list[int], list[bool]]:
        """Return the tokens of a conversation, and which of them are learned.

        The text is encoded as a whole, as transformers does, so that a tokenizer that treats the
        beginning of a text in its own way meets one beginning. No token is added. Learned are
        tokens that begin within an answer or the mark that ends it.

        Raises:
            ChatTemplateError: As in :meth:`mark`.
        """
        chat = self.mark(said)
        encoding = tokenizer.tokenizer.encode(chat.text, add_special_tokens=False)
        ids, offsets = encoding.ids, encoding.offsets  # lists made anew at each access
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
        """Return what follows an answer and is learned with it; empty where nothing marks its end.

        Raises:
            ChatTemplateError: If the template cannot render a question and an answer.
        """
        question = [Message("user", "question"), Message("assistant", "answer")]
        chat = self.mark(Conversation(question))
        ((start, end),) = chat.answers
        return chat.text[start:end].partition("answer")[2]

    def _as_dict(self, message: Message) -> dict[str, Any]:
        fields = {**message.others, "role": message.role, "content": message.content}
        if self._reads_context:
            return fields | {"context": message.context or ""}
        if message.context:
            fields["content"] += f"\n\n{message.context}"
        return fields


def require_words(name: str, source: str, said: Conversation) -> None:
    """Refuse a conversation with tools where a template would leave them out in silence.

    Args:
        name: What messages call the template.
        source: Its program.
        said: The conversation.

    Raises:
        ChatTemplateError: Naming what the template does not write.
    """
    has_calls = any(TOOL_CALLS in message.others for message in said.messages)
    for word, is_there in ((TOOL_CALLS, has_calls), (TOOLS, bool(said.tools))):
        if is_there and word not in source:
            raise ChatTemplateError(
                f"the chat template {name!r} has no words for {word}, which the example has; set "
                'data.chat_template to one that has, such as "tokenizer" of a model tuned for tools'
            )


def template_in_folder(folder: str | Path) -> str | None:
    """Return the source of the chat template in a tokenizer's folder; None if it has none.

    As in transformers, ``chat_template.jinja`` comes before the entry of ``tokenizer_config.json``;
    of several templates there, the one named "default" is taken.

    Raises:
        ChatTemplateError: If the entry is none that transformers writes.
    """
    file = Path(folder) / TEMPLATE_FILE
    if file.is_file():
        try:
            return file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ChatTemplateError(f"{file} cannot be read: {error}") from error
    config = Path(folder) / CONFIG_FILE
    try:
        entry = read_object(config).get("chat_template")
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ChatTemplateError(f"{config.parent}/{error}") from error
    if entry is None or isinstance(entry, str):
        return entry
    if isinstance(entry, list) and all(isinstance(each, dict) for each in entry):
        named = {str(each.get("name")): each.get("template") for each in entry}
        if isinstance(named.get("default"), str):
            return named["default"]
        raise ChatTemplateError(
            f"{config}: chat_template has the templates {shown(list(named))}; one must be named "
            "'default'"
        )
    raise ChatTemplateError(
        f"{config}: chat_template is of type {type(entry).__name__}; expected a text or a list"
    )


class _GenerationBlocks(Extension):
    """Reads ``{% generation %}`` blocks, by which transformers marks answers, as their content."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Any) -> Any:
        """Return the statements inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which limits ranges, with a limit for what grows without a loop too."""

    intercepted_binops = frozenset({"**", "*"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Return the power or the product, unless it would be large."""
        if operator == "**":
            too_large = not (abs(left) <= _LARGEST_BASE and abs(right) <= _LARGEST_EXPONENT)
        else:
            sizes = [len(one) if isinstance(one, Sequence) else abs(one) for one in (left, right)]
            too_large = any(isinstance(one, Sequence) for one in (left, right)) and (
                sizes[0] * sizes[1] > _MOST_REPEATED
            )
        if too_large:
            raise jinja2.TemplateError(f"{operator} would make too large a value")
        return super().call_binop(context, operator, left, right)


# Far beyond what a conversation needs.
_LARGEST_BASE, _LARGEST_EXPONENT, _MOST_REPEATED = 10**6, 64, 10**6


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    # Cached here rather than kept: loader workers get a pickled data set where they are spawned,
    # and a compiled template cannot be pickled.
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment.from_string(source)


def _to_json(value: Any, ensure_ascii: bool = False, **settings: Any) -> str:
    """JSON as it is; Jinja's own filter escapes what HTML does not bear."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **settings)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
