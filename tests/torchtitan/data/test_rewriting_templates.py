"""Templates that write answers otherwise once messages follow, and their own marks."""

from pathlib import Path

import pytest

from tests.torchtitan.data.test_chat_template import (
    AGAIN,
    ASK,
    BYE,
    SAY,
    TOOLS,
    TURNS,
    bracketed,
    build,
    named,
)
from tests.torchtitan.helpers.chat_tokenizers import GUEST, rendered, tokenizer_folder
from torchtitan.data import chat_template
from torchtitan.data.chat_template import ChatTemplate, ChatTemplateError
from torchtitan.data.rows.messages import Conversation, Message
from torchtitan.data.sequences import PLAIN_TEMPLATE

# As Qwen3's: thoughts of turns before the last question are dropped.
THINKING = (
    "{%- set last = namespace(at=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.at = loop.index %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.index > last.at %}"
    "{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}"
    "{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
    "{% generation %}{{ '!' if loop.last }}{{ m.content }}</s>{% endgeneration %}{% else %}"
    "{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
THOUGHT = Message("assistant", "4.", others={"reasoning": "2 + 2"})


def test_what_is_written_otherwise_later_is_read_and_not_learned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chat_template._tell_once.cache_clear()
    template = ChatTemplate("own", THINKING, {})
    assert bracketed(template, [ASK, THOUGHT]) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "[[<think>2 + 2</think>4.<|im_end|>]]\n"
    )
    assert not caplog.records
    assert bracketed(template, [ASK, THOUGHT, AGAIN, BYE]) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n4.<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
        "[[<think></think>Ciao<|im_end|>]]\n"
    )
    assert "'own' writes answers otherwise once messages follow" in caplog.text


def test_a_templates_own_marks_count() -> None:
    template = ChatTemplate("own", MARKED, {})
    assert bracketed(template, [ASK, SAY, AGAIN, BYE]) == (
        "[user]Hi[assistant][[ Hello \n</s>]][user]Bye[assistant][[!Ciao</s>]]"
    )
    given = SAY._replace(is_given=True)
    assert bracketed(template, [ASK, given, AGAIN, BYE]) == (
        "[user]Hi[assistant] Hello \n</s>[user]Bye[assistant][[!Ciao</s>]]"
    )


def test_a_prompt_that_opens_a_thought_needs_marks_around_answers() -> None:
    # As DeepSeek-R1's: answers of the data begin otherwise.
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}<User>{{ m.content }}{% else %}<Assistant>"
        "{% generation %}{{ m.content }}<end>{% endgeneration %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<Assistant><think>\n{% endif %}"
    )
    bare = source.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with pytest.raises(ChatTemplateError, match=r"<think>.* {% generation %} .*template\.jinja"):
        ChatTemplate("own", bare, {}).mark(Conversation([ASK, BYE]))
    assert bracketed(ChatTemplate("own", source, {}), [ASK, BYE]) == (
        "<User>Hi<Assistant>[[Ciao<end>]]"
    )


def test_thoughts_have_the_names_that_transformers_gives_them() -> None:
    source = "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}"
    for name in ("reasoning_content", "thinking", "reasoning"):
        message = Message("assistant", "4.", others={name: "2 + 2,"})
        assert rendered(ChatTemplate("own", source, {}), [message]) == "2 + 2,2 + 2,"
    with pytest.raises(ChatTemplateError, match="'chatml' has no words for reasoning_content"):
        named("chatml").mark(Conversation([ASK, message]))


def test_tools_may_have_a_template_of_their_own(tmp_path: Path) -> None:
    entry = [{"name": "default", "template": GUEST}, {"name": "tool_use", "template": TOOLS}]
    folder = tokenizer_folder(tmp_path / "t", chat_template=entry)
    assert build("tokenizer", folder).mark(TURNS) == ChatTemplate("x", TOOLS, {}).mark(TURNS)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TOOLS + "!")
    (folder / "chat_template.jinja").write_text(GUEST)
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    messages = [{"role": "user", "content": "Hi"}]
    for tools in ([{"name": "add"}], []):
        text = theirs.apply_chat_template(messages, tools=tools or None, tokenize=False)
        assert rendered(build("tokenizer", folder), [ASK], tools) == text


@pytest.mark.parametrize("name", ["plain", "chatml"])
def test_a_text_that_is_too_long_to_be_encoded_is_refused(name: str) -> None:
    template = PLAIN_TEMPLATE if name == "plain" else named(name)
    for length in (2 * 10**6, 10**7):
        said = Conversation([ASK, Message("assistant", "x" * length)])
        with pytest.raises(ChatTemplateError, match="more than 2000000 characters"):
            template.mark(said)
