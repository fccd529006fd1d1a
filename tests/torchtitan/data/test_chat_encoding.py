"""Conversations as tokens: those of transformers, and only answers learned."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.torchtitan.helpers.chat_tokenizers import GUEST, load, rendered, tokenizer_folder
from tests.torchtitan.helpers.loaders import build_loader
from torchtitan.data.chat_template import ChatTemplate
from torchtitan.data.named_templates import NAMED_TEMPLATES, build_chat_template
from torchtitan.data.rows.errors import DataExampleError
from torchtitan.data.rows.examples import read_examples
from torchtitan.data.rows.messages import Conversation, Message
from torchtitan.data.sequences import IGNORE_INDEX, EncodedExample, encode
from torchtitan.data.sources import DataSource
from torchtitan.data.text.tokenizer import FolderTokenizer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SHARED = ROOT.parent / "shared"
ASSETS = ROOT / "tests" / "assets"
NAMES = ["tokenizer", *NAMED_TEMPLATES]
# What ends an answer, as a text.
ENDS = {
    "tokenizer": "<|end|>",
    "alpaca": "<|end|>",
    "llama2": " <|end|>",
    "llama3": "<|eot_id|>",
    "chatml": "<|im_end|>",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_folder(tmp_path_factory.mktemp("chat") / "t", chat_template=GUEST)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> FolderTokenizer:
    return load(folder)


def template_of(name: str, tokenizer: FolderTokenizer) -> ChatTemplate:
    template = build_chat_template(name, tokenizer, tokenizer.tokenizer_path)
    assert template is not None
    return template


def tokens_of(example: EncodedExample) -> list[int]:
    """The tokens of an example that was not cut; the last one is only predicted."""
    assert example.n_cut == 0
    ids = example.input_ids[: example.n_tokens].tolist()
    last = int(example.labels[example.n_tokens - 1])
    return ids if last == IGNORE_INDEX else [*ids, last]


def learned_runs(example: EncodedExample) -> list[list[int]]:
    """The targets, in runs that nothing unlearned interrupts."""
    runs: list[list[int]] = [[]]
    for label in example.labels.tolist():
        if label == IGNORE_INDEX:
            runs.append([])
        else:
            runs[-1].append(label)
    return [run for run in runs if run]


def test_a_conversation_by_hand(tokenizer: FolderTokenizer) -> None:
    messages = [Message("user", "7"), Message("assistant", "8"), Message("user", "9")]
    example = encode(Conversation(messages), template_of("chatml", tokenizer), tokenizer, 32)
    start, end = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id("<|im_end|>")
    (newline,), user, assistant = (
        tokenizer.tokenizer.encode(text).ids for text in ("\n", "user", "assistant")
    )
    digit = {d: tokenizer.token_to_id(d) for d in "789"}
    head = [start, *user, newline, digit["7"], end, newline, start, *assistant, newline]
    whole = [*head, digit["8"], end, newline, start, *user, newline, digit["9"], end, newline]
    assert example.n_tokens == len(whole) - 1
    assert example.input_ids[: example.n_tokens].tolist() == whole[:-1]
    expected = [IGNORE_INDEX] * 32
    expected[len(head) - 1 : len(head) + 1] = [digit["8"], end]
    assert example.labels.tolist() == expected


CONTENT = st.text(
    alphabet=st.characters(blacklist_categories=["Cs"], blacklist_characters="<|"), max_size=12
)


@given(
    pieces=st.lists(st.tuples(CONTENT, CONTENT), min_size=1, max_size=4),
    name=st.sampled_from(NAMES),
    trims=st.booleans(),
)
def test_exactly_the_answers_are_learned(
    pieces: list[tuple[str, str]], name: str, trims: bool
) -> None:
    """Contents stand between marks here, so that no token can join one to what is around it."""
    tokenizer = TRIMMING if trims else PLAIN
    messages = []
    for question, answer in pieces:
        messages += [Message("user", f"({question})"), Message("assistant", f"x{answer}x")]
    example = encode(Conversation(messages), template_of(name, tokenizer), tokenizer, 512)
    texts = [tokenizer.decode(run, skip_special_tokens=False) for run in learned_runs(example)]
    lead = " " if name == "llama2" else ""
    assert texts == [f"{lead}x{answer}x{ENDS[name]}" for _, answer in pieces]
    whole = rendered(template_of(name, tokenizer), messages)
    ids = tokenizer.tokenizer.encode(whole, add_special_tokens=False).ids
    assert tokens_of(example) == ids[: len(tokens_of(example))]
    assert len(ids) - len(tokens_of(example)) in (0, 1), (
        "the last token may be no input and no target"
    )


def test_blanks_before_an_answer_are_not_learned_where_offsets_are_trimmed() -> None:
    """Such a tokenizer says of the blanks that they stand where the answer begins."""
    messages = [Message("user", "Hi"), Message("assistant", "\n\nYes")]
    for tokenizer in (PLAIN, TRIMMING):
        example = encode(Conversation(messages), template_of("chatml", tokenizer), tokenizer, 64)
        (run,) = learned_runs(example)
        learned = tokenizer.decode(run, skip_special_tokens=False)
        assert "\n\nYes<|im_end|>".endswith(learned)
        assert learned.endswith("Yes<|im_end|>")
        example = encode(
            Conversation([Message("user", "Hi"), Message("assistant", "Yes")]),
            template_of("llama3", tokenizer),
            tokenizer,
            64,
        )
        (run,) = learned_runs(example)
        assert tokenizer.decode(run, skip_special_tokens=False) == "Yes<|eot_id|>"


def test_a_tokenizer_that_puts_a_blank_before_each_text(tmp_path: Path) -> None:
    """As Llama 2's: pieces encoded apart would get blanks that the whole text does not have."""
    words = ["▁[INST]", "▁Hi", "▁[/INST]", "▁Ciao", "▁", "<s>", "</s>", "<unk>"]
    inner = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.add_special_tokens(["<s>", "</s>"])
    tokenizer = copy.copy(PLAIN)
    tokenizer.tokenizer, tokenizer.eos_id, tokenizer.bos_id = inner, 6, 5
    tokenizer.config = {"bos_token": "<s>", "eos_token": "</s>"}
    source = NAMED_TEMPLATES["llama2"].source
    template = ChatTemplate("llama2", source, tokenizer.config)
    messages = [Message("user", "Hi"), Message("assistant", "Ciao")]
    example = encode(Conversation(messages), template, tokenizer, 16)
    (run,) = learned_runs(example)
    texts = [inner.id_to_token(i) for i in run]
    assert texts[0] == "▁Ciao"
    assert texts[-1] == "</s>"
    assert "<unk>" not in [inner.id_to_token(i) for i in tokens_of(example)][-len(run) - 1 :]


def _tiny(trims: bool, folder: Path = ASSETS / "tokenizer") -> FolderTokenizer:
    tokenizer = FolderTokenizer(str(folder))
    tokenizer.tokenizer.add_special_tokens(
        ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    )
    if trims:
        tokenizer.tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


@pytest.fixture(scope="module", autouse=True)
def _tiny_has_a_template(folder: Path) -> None:
    for tokenizer in (PLAIN, TRIMMING):
        tokenizer.tokenizer_path = str(folder)


PLAIN, TRIMMING = _tiny(False), _tiny(True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("data", "dataset"), [("instruct", "alpaca"), ("chat", "sharegpt")])
def test_examples_of_ours_are_learned(
    name: str, data: str, dataset: str, tokenizer: FolderTokenizer
) -> None:
    template = template_of(name, tokenizer)
    examples = read_examples(str(ASSETS / f"tiny_{data}"), dataset)
    # Every one of them is learned in the plain format: see test_turns.py.
    for index in range(0, len(examples), 8):
        messages = examples.read(index, lambda said: said.messages)
        example = encode(Conversation(messages), template, tokenizer, 1024)
        texts = [tokenizer.decode(run, skip_special_tokens=False) for run in learned_runs(example)]
        answers = [m.content for m in messages if m.role == "assistant"]
        lead = " " if name == "llama2" else ""
        assert texts == [lead + answer + ENDS[name] for answer in answers]


# --- against transformers -------------------------------------------------------------------------


def as_transformers_has_it(folder: Path, messages: list[dict[str, Any]], **settings: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="not part of the environment")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    return tokenizer.apply_chat_template(messages, **settings)


@pytest.mark.parametrize("name", NAMES)
def test_text_and_tokens_are_those_of_transformers(name: str, folder: Path) -> None:
    tokenizer = load(folder)
    template = template_of(name, tokenizer)
    settings_: dict[str, Any] = {}
    if name != "tokenizer":
        settings_["chat_template"] = NAMED_TEMPLATES[name].source
    messages = [
        Message("system", "Be kind."),
        Message("user", "How many are 2 and 2, and why? ä"),
        Message("assistant", "They are 4.\n\nCount them: 1, 2, 3, 4."),
        Message("user", "Thanks"),
        Message("assistant", "Gladly"),
    ]
    as_dicts = [{"role": m.role, "content": m.content} for m in messages]
    text = as_transformers_has_it(folder, as_dicts, tokenize=False, **settings_)
    assert rendered(template, messages) == text
    prompt = as_transformers_has_it(
        folder, as_dicts[:2], tokenize=False, add_generation_prompt=True, **settings_
    )
    assert rendered(template, messages[:2], prompt=True) == prompt
    ids = as_transformers_has_it(folder, as_dicts, tokenize=True, return_dict=False, **settings_)
    ours = tokens_of(encode(Conversation(messages), template, tokenizer, 512))
    assert list(ids)[: len(ours)] == ours
    assert len(ids) - len(ours) in (0, 1)


def test_answers_are_those_that_transformers_marks(folder: Path) -> None:
    """Its masks come from the generation blocks of a template, ours from the prompts."""
    messages = [
        Message("user", "Hi"),
        Message("assistant", "Hello"),
        Message("user", "Bye"),
        Message("assistant", "Ciao"),
    ]
    marked = as_transformers_has_it(
        folder,
        [{"role": m.role, "content": m.content} for m in messages],
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    tokenizer = load(folder)
    example = encode(Conversation(messages), template_of("tokenizer", tokenizer), tokenizer, 128)
    learned = [False, *(example.labels != IGNORE_INDEX).tolist()]
    masks = [bool(mask) for mask in marked["assistant_masks"]]
    assert learned[: len(masks)] == masks


@pytest.mark.skipif(
    not (SHARED / "data" / "instruct").is_dir() or "TIMELYFREEZE_SMOLLM2" not in os.environ,
    reason="needs shared/data/instruct and TIMELYFREEZE_SMOLLM2, a folder with SmolLM2's tokenizer",
)
@pytest.mark.parametrize(
    ("data", "dataset"),
    [
        ("alpaca_gpt4_1k.jsonl", "alpaca"),
        ("openhermes25_subset_sharegpt.jsonl", "sharegpt"),
        ("sharegpt_gpt4_256.jsonl", "sharegpt"),
    ],
)
def test_real_examples_with_a_real_template_are_those_of_transformers(
    data: str, dataset: str
) -> None:
    folder = Path(os.environ["TIMELYFREEZE_SMOLLM2"])
    transformers = pytest.importorskip("transformers", reason="not part of the environment")
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    tokenizer = load(folder)
    template = template_of("tokenizer", tokenizer)
    examples = read_examples(str(SHARED / "data" / "instruct" / data), dataset)
    for index in range(40):
        messages = examples.read(index, lambda said: said.messages)
        as_dicts = [
            {"role": m.role, "content": m.content + (f"\n\n{m.context}" if m.context else "")}
            for m in messages
        ]
        ids = list(theirs.apply_chat_template(as_dicts, tokenize=True, return_dict=False))
        example = encode(Conversation(messages), template, tokenizer, len(ids) + 1)
        ours = tokens_of(example)
        assert ids[: len(ours)] == ours
        assert len(ids) - len(ours) in (0, 1)
        texts = [tokenizer.decode(run, skip_special_tokens=False) for run in learned_runs(example)]
        answers = [m["content"] for m in as_dicts if m["role"] == "assistant"]
        assert "".join(texts) == "".join(f"{answer}<|im_end|>" for answer in answers)


# --- in the loader --------------------------------------------------------------------------------


def test_the_loader_takes_a_template(tokenizer: FolderTokenizer) -> None:
    template = template_of("chatml", tokenizer)
    inputs, _ = next(iter(build_loader(tokenizer=tokenizer, seq_len=256, template=template)))
    text = tokenizer.decode(inputs["input"][0].tolist(), skip_special_tokens=False)
    assert text.startswith("<|im_start|>user\n")


def test_an_example_that_the_template_refuses_is_named(
    tmp_path: Path, tokenizer: FolderTokenizer
) -> None:
    path = tmp_path / "examples.jsonl"
    good = '{"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]}'
    late = good.replace("]}", ', {"from": "system", "value": "z"}]}')
    path.write_text(f"{good}\n{late}\n")
    with pytest.raises(DataExampleError) as error:
        build_loader(
            tokenizer=tokenizer,
            sources=[DataSource("sharegpt", str(path))],
            template=template_of("llama2", tokenizer),
        )
    assert str(error.value) == (
        f"{path}, line 2: the chat template 'llama2' refuses: a system message must come first"
    )
