"""Templates: what they write, and where in it the answers are."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from torchtitan.components.tokenizer import BaseTokenizer

from tests.torchtitan.helpers.chat_tokenizers import GUEST, load, rendered, tokenizer_folder
from torchtitan.data.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    template_in_folder,
)
from torchtitan.data.named_templates import (
    NAMED_TEMPLATES,
    build_chat_template,
    choice_told,
    known_templates,
    template_error,
)
from torchtitan.data.rows.messages import Conversation, Message

SYSTEM = Message("system", "Be kind.")
ASK, SAY = Message("user", "Hi"), Message("assistant", " Hello \n")
AGAIN, BYE = Message("user", "Bye"), Message("assistant", "Ciao")
ADD = Message("user", "Add.", "1 2")

ALONE = "Below is an instruction that describes a task. "
PAIRED = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. "
)
WRITE = "Write a response that appropriately completes the request.\n\n"

# Name, messages, the text with what is learned in double brackets.
CASES = [
    ("alpaca", [ASK, BYE], f"<s>{ALONE}{WRITE}### Instruction:\nHi\n\n### Response:\n[[Ciao</s>]]"),
    (
        "alpaca",
        [ADD, BYE],
        f"<s>{PAIRED}{WRITE}### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n"
        "[[Ciao</s>]]",
    ),
    (
        "alpaca",
        [SYSTEM, ASK, SAY, AGAIN, BYE],
        "<s>Be kind.\n\n### Instruction:\nHi\n\n### Response:\n[[ Hello \n</s>]]\n\n"
        "### Instruction:\nBye\n\n### Response:\n[[Ciao</s>]]",
    ),
    ("llama2", [ASK, BYE], "<s>[INST] Hi [/INST][[ Ciao </s>]]"),
    ("llama2", [ADD, BYE], "<s>[INST] Add.\n\n1 2 [/INST][[ Ciao </s>]]"),
    (
        "llama2",
        [SYSTEM, ASK, SAY, AGAIN, BYE],
        "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi [/INST][[ Hello </s>]]"
        "<s>[INST] Bye [/INST][[ Ciao </s>]]",
    ),
    (
        "llama3",
        [SYSTEM, ASK, SAY, AGAIN, BYE],
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[Hello<|eot_id|>]]"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[[Ciao<|eot_id|>]]",
    ),
    (
        "chatml",
        [ASK, SAY, AGAIN, BYE],
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[ Hello \n<|im_end|>]]\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[[Ciao<|im_end|>]]\n",
    ),
    # Two answers in an example, one at the beginning, and a question at the end.
    (
        "chatml",
        [SAY, BYE, ASK],
        "<|im_start|>assistant\n[[ Hello \n<|im_end|>]]\n<|im_start|>assistant\n"
        "[[Ciao<|im_end|>]]\n<|im_start|>user\nHi<|im_end|>\n",
    ),
]


def named(name: str) -> ChatTemplate:
    template = NAMED_TEMPLATES[name]
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate(name, template.source, tokens, reads_context=template.reads_context)


def bracketed(template: ChatTemplate, messages: list[Message]) -> str:
    """The text with brackets around what is learned."""
    text, answers = template.mark(Conversation(messages))
    pieces, behind = [], 0
    for start, end in answers:
        pieces += [text[behind:start], "[[", text[start:end], "]]"]
        behind = end
    return "".join([*pieces, text[behind:]])


@pytest.mark.parametrize(("name", "messages", "expected"), CASES)
def test_a_named_template_by_hand(name: str, messages: list[Message], expected: str) -> None:
    assert bracketed(named(name), messages) == expected


def test_every_named_template_has_a_case() -> None:
    assert {name for name, _, _ in CASES} == set(NAMED_TEMPLATES)
    assert known_templates() == (
        *("auto", "plain", "tokenizer"),
        *("alpaca", "llama2", "llama3", "chatml"),
    )


def test_a_prompt_is_what_stands_before_the_answer() -> None:
    """What is read at inference is what training has in front of the answer."""
    for name in NAMED_TEMPLATES:
        template = named(name)
        prompt = rendered(template, [SYSTEM, ASK], prompt=True)
        text, ((start, _),) = template.mark(Conversation([SYSTEM, ASK, BYE]))
        assert text[:start] == prompt


def test_llama2_wants_its_system_message_first() -> None:
    with pytest.raises(ChatTemplateError, match="'llama2' refuses: a system message must come"):
        named("llama2").mark(Conversation([ASK, BYE, SYSTEM]))


def test_a_template_of_a_folder() -> None:
    template = ChatTemplate("tokenizer", GUEST, {"eos_token": "</s>"})
    assert bracketed(template, [ASK, SAY, AGAIN, BYE]) == (
        "[sys]Be brief.\n[user]Hi\n[bot][[Hello</s>]]\n[user]Bye\n[bot][[Ciao</s>]]\n"
    )
    assert template.end_of_answer() == "</s>"


def test_answers_without_an_end_are_found_too() -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template = ChatTemplate(
        "x", source + "{% if add_generation_prompt %}assistant: {% endif %}", {}
    )
    assert bracketed(template, [ASK, BYE]) == "user: Hi\nassistant: [[Ciao]]\n"
    assert bracketed(template, [ASK, Message("assistant", "")]) == "user: Hi\nassistant: [[]]\n"
    assert template.end_of_answer() == ""


def test_what_templates_of_transformers_use() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% endfor %}"
        "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %} no date{% endif %}"
        "{% if tools %}tools{% endif %}{{ pad_token }}"
    )
    text = rendered(ChatTemplate("x", source, {}), [Message("user", "<ä>"), BYE, ASK])
    assert text == (
        '{"role": "user", "content": "<ä>"}{"role": "assistant", "content": "Ciao"} no date'
    )


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses: roles must alternate"),
        ("{{ messages[9].content.x }}", "refuses: .*no element 9"),
        ("{{ bos_token + 'x' }}", "refuses: 'bos_token' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "refuses: .*unsafe"),
        ("{{ messages.append(1) }}", "refuses: .*not safely callable|refuses: .*unsafe"),
        # Writes each answer differently once another message follows, and where it is asked for.
        (
            "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
            "writes no answer as it would be written at inference",
        ),
    ],
)
def test_what_a_template_cannot_do_is_told(source: str, text: str) -> None:
    with pytest.raises(ChatTemplateError, match=text):
        ChatTemplate("x", source, {}).mark(Conversation([ASK, SAY, AGAIN, BYE]))


def test_a_broken_template_is_told_with_its_line() -> None:
    with pytest.raises(ChatTemplateError, match="chat template 'mine', line 2: "):
        ChatTemplate("mine", "x\n{% for %}", {})


def test_where_a_folder_keeps_its_template(tmp_path: Path) -> None:
    assert template_in_folder(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    for entry, expected in [
        (None, None),
        ("text", "text"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
    ]:
        config.write_text(json.dumps({"chat_template": entry}))
        assert template_in_folder(tmp_path) == expected
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert template_in_folder(tmp_path) == "from the file"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not JSON"),
        ('{"chat_template": [{"name": "rag", "template": "x"}]}', "one must be named 'default'"),
        ('{"chat_template": 3}', "is of type int; expected a text or a list"),
    ],
)
def test_entries_that_transformers_does_not_write(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ChatTemplateError, match=problem):
        template_in_folder(tmp_path)
    assert problem in str(template_error("tokenizer", str(tmp_path)))


# --- with a tokenizer -----------------------------------------------------------------------------


def build(name: str, folder: Path) -> Any:
    return build_chat_template(name, load(folder), str(folder))


def test_special_tokens_are_the_tokenizers(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "t", bos_token={"content": "<|begin|>"})
    template = build("llama2", folder)
    assert rendered(template, [ASK, BYE]) == "<|begin|>[INST] Hi [/INST] Ciao <|end|>"
    assert build("plain", folder).name == "plain"


def test_tokens_that_a_template_needs(tmp_path: Path) -> None:
    bare = tokenizer_folder(tmp_path / "bare", tokens=[], eos_token=None)
    with pytest.raises(ChatTemplateError) as error:
        build("chatml", bare)
    assert "data.chat_template is 'chatml', which needs the tokens <|im_start|>, <|im_end|>" in str(
        error.value
    )
    assert repr(str(bare)) in str(error.value)
    assert "choose 'auto' or another template" in str(error.value)
    for name, missing in [("llama2", "eos_token"), ("llama3", "<|start_header_id|>, <|end_")]:
        with pytest.raises(ChatTemplateError, match=missing.replace("|", r"\|")):
            build(name, bare)
    whole = tokenizer_folder(tmp_path / "whole")
    for name in NAMED_TEMPLATES:
        assert build(name, whole).name == name


def test_a_folder_without_a_template_is_told(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "t")
    error = template_error("tokenizer", str(folder))
    assert error is not None
    for part in ("data.chat_template is 'tokenizer'", "has no chat template", "chatml"):
        assert part in error
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        build("tokenizer", folder)
    assert template_error("tokenizer", str(tmp_path / "nowhere")) is None, "told by upstream"


def test_an_unknown_name_is_told_with_the_known_ones() -> None:
    error = template_error("vicuna", "")
    assert error == (
        "data.chat_template is 'vicuna'; known: auto, plain, tokenizer, alpaca, llama2, llama3, "
        "chatml"
    )


def test_a_template_that_marks_no_end_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    build("tokenizer", tokenizer_folder(tmp_path / "a", chat_template=source))
    assert "'tokenizer' marks no end of an answer" in caplog.text
    caplog.clear()
    build("tokenizer", tokenizer_folder(tmp_path / "b", chat_template=GUEST))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_another_tokenizer_has_no_templates(tmp_path: Path) -> None:
    class Other(BaseTokenizer):
        encode = decode = get_vocab_size = None

    with pytest.raises(ChatTemplateError, match=r"needs a Hugging Face tokenizer, .* is Other"):
        build_chat_template("alpaca", Other(), "")


# --- tools ----------------------------------------------------------------------------------------

TOOLS = (
    "{% if tools %}[tools]{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }} "
    "{{- call.function.arguments | tojson }}>{% endfor %}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
CALLS = {"tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
TURNS = Conversation(
    [ASK, Message("assistant", "", others=CALLS), Message("tool", "4"), Message("assistant", "4.")],
    [{"name": "add"}],
)


def test_calls_are_learned_and_what_tools_return_is_not() -> None:
    text, answers = ChatTemplate("x", TOOLS, {}).mark(TURNS)
    assert text.startswith('[tools][{"name": "add"}]\n[user]Hi</s>\n[assistant]<add')
    learned = [text[start:end] for start, end in answers]
    assert learned == ['<add{"a": 2}></s>', "4.</s>"]


def test_given_answers_are_not_learned() -> None:
    messages = [ASK, SAY._replace(is_given=True), AGAIN, BYE]
    text, answers = named("chatml").mark(Conversation(messages))
    assert [text[start:end] for start, end in answers] == ["Ciao<|im_end|>"]
    assert text == named("chatml").mark(Conversation([ASK, SAY, AGAIN, BYE])).text


@pytest.mark.parametrize("name", list(NAMED_TEMPLATES))
def test_a_template_without_words_for_tools_is_refused(name: str) -> None:
    with pytest.raises(ChatTemplateError, match=f"'{name}' has no words for tool_calls, which the"):
        named(name).mark(TURNS._replace(tools=[]))
    with pytest.raises(ChatTemplateError, match=f"'{name}' has no words for tools, which the exa"):
        named(name).mark(Conversation([ASK, BYE], TURNS.tools))


@pytest.mark.parametrize("name", ["alpaca", "llama2"])
def test_a_tool_is_not_taken_for_another_role(name: str) -> None:
    with pytest.raises(ChatTemplateError, match="it has no words for role tool"):
        named(name).mark(Conversation([ASK, Message("tool", "4"), BYE]))


# --- what "auto" stands for -----------------------------------------------------------------------


def test_auto_takes_the_tokenizers_own_template_or_alpaca(tmp_path: Path) -> None:
    whole = tokenizer_folder(tmp_path / "whole", chat_template=GUEST)
    bare = tokenizer_folder(tmp_path / "bare")
    assert build("auto", whole).name == "tokenizer"
    assert build("auto", bare).name == "alpaca"
    assert build("auto", bare).mark(Conversation([ASK, BYE])) == build("alpaca", bare).mark(
        Conversation([ASK, BYE])
    )
    assert template_error("auto", str(bare)) is None
    told = choice_told("auto", str(whole))
    assert told == (
        "data.chat_template is 'auto': taking 'tokenizer', since the tokenizer in "
        f"model.hf_assets_path ({str(whole)!r}) has one"
    )
    assert "taking 'alpaca'" in str(choice_told("auto", str(bare)))
    assert choice_told("plain", str(bare)) is None


def test_auto_without_an_end_token_is_told_with_what_was_asked(tmp_path: Path) -> None:
    bare = tokenizer_folder(tmp_path / "bare", eos_token=None)
    with pytest.raises(
        ChatTemplateError, match=r"is 'auto', so 'alpaca', which needs the tokens eos.* 'plain' or"
    ):
        build("auto", bare)
