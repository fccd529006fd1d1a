"""From examples to tokens: only answers are learned, to the token."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors
from torchtitan.components.tokenizer import BaseTokenizer

from torchtitan.data.rows.examples import read_examples
from torchtitan.data.rows.kinds import ROW_KINDS, is_instruct_dataset
from torchtitan.data.rows.messages import alpaca_messages, sharegpt_messages
from torchtitan.data.sequences import (
    IGNORE_INDEX,
    PLAIN_TEMPLATE,
    EncodedExample,
    PlainTemplate,
    Turn,
    encode,
)
from torchtitan.data.text.tokenizer import FolderTokenizer

ROOT = Path(__file__).parents[3]
SHARED = ROOT.parent / "shared"
ASSETS = ROOT / "tests" / "assets"
END = "<|end|>"


class TurnsByHand(PlainTemplate):
    """Takes turns where the plain format makes them of messages."""

    def mark(self, said: Any) -> list[Turn]:
        return said


def encode_example(turns: list[Turn], tokenizer: BaseTokenizer, seq_len: int) -> EncodedExample:
    return encode(turns, TurnsByHand(), tokenizer, seq_len)


def format_alpaca(example: dict[str, Any]) -> list[Turn]:
    return PLAIN_TEMPLATE.mark(alpaca_messages(example))


def format_sharegpt(example: dict[str, Any]) -> list[Turn]:
    return PLAIN_TEMPLATE.mark(sharegpt_messages(example))


def tiny_tokenizer() -> FolderTokenizer:
    return FolderTokenizer(str(ASSETS / "tokenizer"))


@pytest.fixture(scope="module")
def tokenizer() -> FolderTokenizer:
    return tiny_tokenizer()


class CharTokenizer(BaseTokenizer):
    """One token a character, from 10 on; shows what is done with any upstream tokenizer."""

    def __init__(self, eos_id: int | None = None, bos_id: int | None = None) -> None:
        super().__init__()
        self.eos_id, self.bos_id = eos_id, bos_id

    def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
        assert not add_bos
        assert not add_eos
        return [ord(letter) - ord("a") + 10 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i - 10 + ord("a")) for i in ids)

    def get_vocab_size(self) -> int:
        return 36


# "ab" is asked, "cd" answered, "e" asked, "f" answered: a=10, b=11, ...
TURNS = [
    Turn("user", "ab", False),
    Turn("assistant", "cd", True),
    Turn("user", "e", False),
    Turn("assistant", "f", True),
]


def test_a_example_by_hand() -> None:
    example = encode_example(TURNS, CharTokenizer(eos_id=1, bos_id=0), 12)
    #                                bos   a   b   c   d end   e   f
    assert example.input_ids.tolist() == [0, 10, 11, 12, 13, 1, 14, 15, 1, 1, 1, 1]
    assert example.labels.tolist() == [-100, -100, 12, 13, 1, -100, 15, 1, *[-100] * 4]
    assert (example.n_tokens, example.n_cut) == (8, 0)
    assert example.input_ids.dtype == example.labels.dtype == torch.int64


@pytest.mark.parametrize(
    ("eos", "bos", "ids", "labels", "n_tokens"),
    [
        (1, None, [10, 11, 12, 13, 1, 14, 15, 1, 1], [-100, 12, 13, 1, -100, 15, 1], 7),
        (None, 0, [0, 10, 11, 12, 13, 14, 0, 0, 0], [-100, -100, 12, 13, -100, 15], 6),
        (None, None, [10, 11, 12, 13, 14, 0, 0, 0, 0], [-100, 12, 13, -100, 15], 5),
    ],
)
def test_tokenizers_without_begin_or_end(
    eos: int | None, bos: int | None, ids: list[int], labels: list[int], n_tokens: int
) -> None:
    example = encode_example(TURNS, CharTokenizer(eos, bos), 9)
    assert example.input_ids.tolist() == ids
    assert example.labels.tolist() == labels + [IGNORE_INDEX] * (9 - len(labels))
    assert example.n_tokens == n_tokens


@pytest.mark.parametrize("seq_len", range(1, 11))
def test_cutting_keeps_the_beginning(seq_len: int) -> None:
    whole = encode_example(TURNS, CharTokenizer(eos_id=1, bos_id=0), 8)
    example = encode_example(TURNS, CharTokenizer(eos_id=1, bos_id=0), seq_len)
    length = min(seq_len, 8)
    assert example.input_ids.tolist()[:length] == whole.input_ids.tolist()[:length]
    assert example.labels.tolist()[:length] == whole.labels.tolist()[:length]
    assert example.input_ids.shape == example.labels.shape == (seq_len,)
    assert (example.n_tokens, example.n_cut) == (length, 8 - length)
    assert example.has_target == (seq_len >= 3), "the first answer token is the third label"


def test_the_turns_of_alpaca() -> None:
    example = {"instruction": "Add.", "input": "1 2", "output": "3"}
    assert format_alpaca(example) == [
        Turn("user", "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n", False),
        Turn("assistant", "3", True),
    ]
    assert (
        format_alpaca(example | {"input": " "})[0].text
        == "### Instruction:\nAdd.\n\n### Response:\n"
    )


def test_the_turns_of_sharegpt() -> None:
    said = [("system", "Be kind."), ("human", "Hi"), ("gpt", "Hello"), ("user", "Bye")]
    said += [("assistant", "Ciao"), ("model", "M"), ("chatgpt", "C")]
    example = {"conversations": [{"from": who, "value": what} for who, what in said]}
    header = Turn("assistant", "### Assistant:\n", False)
    assert format_sharegpt(example) == [
        Turn("system", "### System:\nBe kind.\n\n", False),
        Turn("user", "### User:\nHi\n\n", False),
        *[header, Turn("assistant", "Hello", True)],
        Turn("user", "### User:\nBye\n\n", False),
        *[header, Turn("assistant", "Ciao", True)],
        *[header, Turn("assistant", "M", True)],
        *[header, Turn("assistant", "C", True)],
    ]


def test_the_table_of_data_sets() -> None:
    assert ROW_KINDS["alpaca"].default_path == "vicgalle/alpaca-gpt4"
    assert ROW_KINDS["sharegpt"].default_path == "teknium/OpenHermes-2.5"
    assert is_instruct_dataset("Alpaca")
    assert not is_instruct_dataset("c4_test")


def check_example(turns: list[Turn], tokenizer: FolderTokenizer, seq_len: int) -> int:
    """Compare an encoded example with what its text alone says; return its length in tokens."""
    example = encode_example(turns, tokenizer, seq_len)
    ids, labels, n = example.input_ids.tolist(), example.labels.tolist(), example.n_tokens
    # Next token: where a label is, it is the next input, so only the last one can lie outside.
    for i in range(n - 1):
        assert labels[i] in (IGNORE_INDEX, ids[i + 1])
    assert labels[n:] == [IGNORE_INDEX] * (seq_len - n)
    assert set(ids[n:]) <= {tokenizer.token_to_id("<|pad|>") or tokenizer.eos_id}
    if example.n_cut:
        assert n == seq_len
        return n + example.n_cut
    # The text of all tokens is the example's text; that of the learned ones is the answers', each
    # with its end. The rest, prompts and headers, is not learned.
    end = tokenizer.eos_token
    spans: list[tuple[bool, list[int]]] = []
    for token, label in zip([*ids[1:n], labels[n - 1]], labels[:n], strict=True):
        if not spans or spans[-1][0] != (label != IGNORE_INDEX):
            spans.append((label != IGNORE_INDEX, []))
        spans[-1][1].append(token)
    texts = [(learned, tokenizer.decode(s, skip_special_tokens=False)) for learned, s in spans]
    want: list[tuple[bool, str]] = []
    for turn in turns:
        text = turn.text + end if turn.is_target else turn.text
        if want and want[-1][0] == turn.is_target:
            text = want.pop()[1] + text
        want.append((turn.is_target, text))
    assert texts == want
    return n


@given(
    pieces=st.lists(
        st.tuples(st.text(min_size=1, max_size=20), st.text(max_size=20)), min_size=1, max_size=5
    ),
    seq_len=st.sampled_from([1, 8, 64, 1024]),
)
def test_any_text_is_learned_exactly(pieces: list[tuple[str, str]], seq_len: int) -> None:
    # The prompts' headers keep two answers apart; "<" is left out so that no text spells <|end|>.
    turns = []
    for prompt, answer in pieces:
        turns.append(Turn("user", prompt.replace("<", "") + "\n", False))
        turns.append(Turn("assistant", answer.replace("<", ""), True))
    check_example(turns, TINY, seq_len)


TINY = tiny_tokenizer()


def test_a_tokenizer_that_adds_a_begin_token_itself() -> None:
    tokenizer = tiny_tokenizer()
    bos = tokenizer.bos_id
    tokenizer.tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", 0), ("<|end|>", 1)]
    )
    tokenizer._infer_should_add_bos_eos()
    assert tokenizer.hf_adds_bos, "or this test tests nothing"
    assert tokenizer.encode("x", add_bos=False, add_eos=False)[0] == bos
    turns = format_alpaca({"instruction": "Say hi.", "input": "", "output": "Hi."})
    example = encode_example(turns, tokenizer, 64)
    assert example.input_ids.tolist() == encode_example(turns, TINY, 64).input_ids.tolist()
    assert example.input_ids.tolist().count(bos) == 1


def test_padding_takes_the_pad_token_or_the_end_token() -> None:
    tokenizer = tiny_tokenizer()
    turns = [Turn("user", "x", False), Turn("assistant", "y", True)]
    assert encode_example(turns, tokenizer, 8).input_ids[-1] == 2
    tokenizer.pad_id = None
    assert encode_example(turns, tokenizer, 8).input_ids[-1] == tokenizer.eos_id == 1


@pytest.mark.parametrize(("name", "dataset"), [("instruct", "alpaca"), ("chat", "sharegpt")])
def test_every_example_of_ours_is_learned_exactly(
    name: str, dataset: str, tokenizer: FolderTokenizer
) -> None:
    examples = read_examples(str(ASSETS / f"tiny_{name}"), dataset)
    turns = [examples.read(i, PLAIN_TEMPLATE.mark) for i in range(len(examples))]
    lengths = [check_example(said, tokenizer, 512) for said in turns]
    assert max(lengths) < 512, "so that none was cut and all were compared in full"


REAL = [
    ("alpaca_gpt4_1k.jsonl", "alpaca", 985),
    ("openhermes25_subset_sharegpt.jsonl", "sharegpt", 2000),
]
needs_real_examples = pytest.mark.skipif(
    not (SHARED / "data" / "instruct").is_dir(),
    reason="needs the folder shared/data/instruct beside the repository (real examples, not ours)",
)


@needs_real_examples
@pytest.mark.parametrize(("name", "dataset", "count"), REAL)
@pytest.mark.parametrize("which", ["tiny", "smollm2"])
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.long), 8])
def test_real_examples_are_learned_exactly(
    name: str, dataset: str, count: int, which: str, every: int, tokenizer: FolderTokenizer
) -> None:
    if which == "smollm2":
        folder = os.environ.get("TIMELYFREEZE_SMOLLM2")
        if not folder:
            pytest.skip("needs TIMELYFREEZE_SMOLLM2, a folder with SmolLM2's tokenizer")
        tokenizer = FolderTokenizer(folder)
    path = SHARED / "data" / "instruct" / name
    examples = read_examples(str(path), dataset)
    assert len(examples) == count
    turns = [examples.read(i, PLAIN_TEMPLATE.mark) for i in range(0, count, every)]
    lengths = [check_example(said, tokenizer, 2048) for said in turns]
    assert sum(length <= 2048 for length in lengths) > 0.9 * len(lengths)
