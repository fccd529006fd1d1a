"""Packing: no example lost or split, none seen by another, resumed exactly."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.torchtitan.helpers.chat_tokenizers import tokenizer_folder
from tests.torchtitan.helpers.loaders import build_loader
from tests.torchtitan.helpers.number_tokenizer import NumberTokenizer, numbered_examples
from torchtitan.data import dataset as instruct_data
from torchtitan.data.dataset import InstructDataset
from torchtitan.data.sequences import (
    IGNORE_INDEX,
    EncodedExample,
    as_batch,
    join_examples,
    pack,
    sequence_text,
)
from torchtitan.freezing import samples as show_samples

ASSETS = Path(__file__).parents[2] / "assets"
SEQ_LEN = 12


def test_packing_by_hand() -> None:
    # Longest first: 7 and 3 fill one sequence, 6 and 4 another, the 2s go into a third.
    assert pack([2, 6, 3, 7, 4, 2], 10) == [[0, 5], [1, 4], [2, 3]]
    assert pack([5], 5) == [[0]]
    assert pack([], 5) == []


@given(lengths=st.lists(st.integers(1, 20), max_size=60))
def test_every_example_is_in_one_sequence_and_no_two_sequences_could_be_one(
    lengths: list[int],
) -> None:
    sequences = pack(lengths, 20)
    assert sorted(itertools.chain.from_iterable(sequences)) == list(range(len(lengths)))
    totals = [sum(lengths[place] for place in sequence) for sequence in sequences]
    assert all(total <= 20 for total in totals)
    assert all(a + b > 20 for a, b in itertools.combinations(totals, 2))
    assert sequences == sorted(sorted(sequence) for sequence in sequences)


def encoded(ids: list[int], labels: list[int], seq_len: int = SEQ_LEN) -> EncodedExample:
    rest = seq_len - len(ids)
    return EncodedExample(
        torch.tensor(ids + [0] * rest), torch.tensor(labels + [IGNORE_INDEX] * rest), len(ids), 0
    )


def test_joined_examples_by_hand() -> None:
    examples = [encoded([10, 11, 12], [-100, 12, 1]), encoded([20, 21], [-100, 22])]
    inputs, labels = join_examples(examples, 8, pad_id=2)
    assert {name: value.tolist() for name, value in inputs.items()} == {
        "input": [10, 11, 12, 20, 21, 2, 2, 2],
        "n_tokens": 5,
        "positions": [0, 1, 2, 0, 1, 0, 1, 2],
        "lengths": [3, 2, 3],
    }
    assert labels.tolist() == [-100, 12, 1, -100, 22, -100, -100, -100]
    full, _ = join_examples([encoded([1, 2, 3], [2, 3, 4], 3)], 3, pad_id=2)
    assert full["positions"].tolist() == [0, 1, 2]
    assert full["lengths"].tolist() == [3, 0]  # no padding


@pytest.mark.parametrize(("n_examples", "n_documents"), [(1, 2), (3, 4), (4, 8), (7, 8), (8, 16)])
def test_lengths_of_a_batch_are_filled_up_to_a_power_of_two(
    n_examples: int, n_documents: int
) -> None:
    many = join_examples([encoded([5], [6], 1)] * n_examples, SEQ_LEN, pad_id=2)
    one = join_examples([encoded([10, 11, 12], [-100, 12, 1])], SEQ_LEN, pad_id=2)
    inputs, labels = as_batch([many, one])
    assert inputs["lengths"].dtype == torch.int32
    assert inputs["lengths"].tolist() == [
        [1] * n_examples + [SEQ_LEN - n_examples] + [0] * (n_documents - n_examples - 1),
        [3, SEQ_LEN - 3] + [0] * (n_documents - 2),
    ]
    assert torch.equal(labels, torch.stack([many[1], one[1]]))
    assert inputs["input"].tolist() == [many[0]["input"].tolist(), one[0]["input"].tolist()]


# --- the stream -----------------------------------------------------------------------------------


def make(prompts: list[int], **kwargs: Any) -> InstructDataset:
    """A prompt of n tokens makes n + 1 inputs, and no target where n is above SEQ_LEN."""
    kwargs = {"packing": True, **kwargs}
    return InstructDataset(numbered_examples(prompts), NumberTokenizer(), SEQ_LEN, **kwargs)


def examples_in(inputs: dict[str, torch.Tensor]) -> list[int]:
    """Which examples a sequence holds, told by the first token of each."""
    n = int(inputs["n_tokens"])
    starts = (inputs["positions"][:n] == 0).nonzero().flatten()
    return (inputs["input"][starts] - 100).tolist()


PROMPTS = st.lists(st.integers(1, SEQ_LEN + 2), min_size=1, max_size=30).filter(
    lambda prompts: min(prompts) <= SEQ_LEN
)


@given(prompts=PROMPTS, window=st.integers(1, 8), seed=st.none() | st.integers(0, 5))
def test_an_epoch_has_every_example_once(prompts: list[int], window: int, seed: int | None) -> None:
    data = make(prompts, shuffle_seed=seed)
    data._window = window
    kept = [i for i, n in enumerate(prompts) if n <= SEQ_LEN]
    found: list[int] = []
    stream = iter(data)
    while len(found) < len(kept):
        inputs, labels = next(stream)
        examples = examples_in(inputs)
        found += examples
        n = int(inputs["n_tokens"])
        # Each example by hand: its answer and the end are learned, its prompt and the padding are
        # not.
        text, targets, places = [], [], []
        for example in examples:
            text += ([100 + example] * prompts[example] + [7])[:SEQ_LEN]
            targets += ([IGNORE_INDEX] * (prompts[example] - 1) + [7, 1])[:SEQ_LEN]
            places += range(min(prompts[example] + 1, SEQ_LEN))
        assert n == len(text) <= SEQ_LEN
        assert inputs["input"].tolist() == text + [1] * (SEQ_LEN - n)
        assert labels.tolist() == targets + [IGNORE_INDEX] * (SEQ_LEN - n)
        assert inputs["positions"].tolist() == [*places, *range(SEQ_LEN - n)]
    assert sorted(found) == kept


@pytest.mark.slow
@given(
    prompts=st.lists(st.integers(1, SEQ_LEN - 1), min_size=2, max_size=12),
    window=st.integers(1, 5),
    seed=st.none() | st.integers(0, 5),
    position=st.integers(0, 25),
    world_size=st.integers(1, 2),
)
def test_a_resumed_stream_is_the_stream_that_never_stopped(
    prompts: list[int], window: int, seed: int | None, position: int, world_size: int
) -> None:
    def begin() -> InstructDataset:
        data = make(prompts, shuffle_seed=seed, dp_world_size=world_size, dp_rank=world_size - 1)
        data._window = window
        return data

    def taken(stream: Any, count: int) -> list[list[int]]:
        return [examples_in(inputs) for inputs, _ in itertools.islice(stream, count)]

    whole = taken(iter(begin()), position + 20)
    first = begin()
    assert taken(iter(first), position) == whole[:position]
    state = json.loads(json.dumps(first.state_dict()))
    second = begin()
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert taken(iter(second), 20) == whole[position:]


def test_dropped_and_cut_examples_are_counted_once_whatever_is_resumed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    prompts = [3, SEQ_LEN + 1, SEQ_LEN - 1, 2, SEQ_LEN + 2]
    data = make(prompts)
    data._window = 3
    for _ in range(7):  # three sequences in an epoch, two of them in the first window
        state = data.state_dict()
        data = make(prompts)
        data._window = 3
        data.load_state_dict(state)
        next(iter(data))
    told = [record.getMessage() for record in caplog.records if "dropped" in record.msg]
    assert told[0].startswith("epoch 0 of rank 0: 2 of 5 examples dropped")
    assert told[1].startswith("epoch 1 of rank 0: 2 of 5 examples dropped")


def test_a_state_of_other_sequences_is_refused() -> None:
    state = make([1, 2, 3]).state_dict()
    with pytest.raises(ValueError, match="has packing = '12 tokens, plain', this run has None"):
        make([1, 2, 3], packing=False).load_state_dict(state)
    with pytest.raises(ValueError, match="has packing = None"):
        make([1, 2, 3]).load_state_dict(make([1, 2, 3], packing=False).state_dict())


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_packs_and_resumes(workers: int) -> None:
    kwargs = {"shuffle_seed": 1, "packing": True, "loading": {"num_workers": workers}}
    loader = build_loader(seq_len=256, **kwargs)
    stream = iter(loader)
    for _ in range(7):
        inputs, labels = next(stream)
    assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (4, 256)
    assert inputs.n_tokens.shape == (4,)
    assert inputs["lengths"].sum(dim=1).tolist() == [256] * 4
    assert inputs.rows is None  # another epoch packs other sequences
    state = loader.state_dict()
    want = next(stream)
    resumed = build_loader(seq_len=256, **kwargs)
    resumed.load_state_dict(state)
    inputs, labels = next(iter(resumed))
    for name in inputs:
        assert torch.equal(inputs[name], want[0][name]), name
    assert torch.equal(inputs.n_tokens, want[0].n_tokens)
    assert torch.equal(labels, want[1])


def test_little_stays_empty() -> None:
    """Real lengths of examples: a window leaves its last sequences unfilled, no more."""
    stream = iter(build_loader(seq_len=1024, packing=True))
    filled = sum(int(next(stream)[0].n_tokens.sum()) for _ in range(8))
    assert filled > 0.9 * 8 * 4 * 1024
    assert instruct_data.WINDOW_EXAMPLES == 128


N = IGNORE_INDEX


def letters(ids: list[int]) -> str:
    return "".join("\n" if i == 0 else chr(96 + i) for i in ids)


def test_a_packed_sequence_by_hand() -> None:
    # Examples "ab" -> "cd\n" -> "e", of which "cd\n" is learned, and "f" -> "g", whose target is no
    # input.
    inputs = {
        "input": torch.tensor([1, 2, 3, 4, 0, 5, 6, 9, 9]),
        "n_tokens": torch.tensor(7),
        "positions": torch.tensor([0, 1, 2, 3, 4, 5, 0, 0, 1]),
    }
    labels = torch.tensor([N, 3, 4, 0, N, N, 7, N, N])
    assert sequence_text(inputs, labels, letters).splitlines() == [
        "2 examples, 7 tokens and 2 of padding; 4 targets",
        "",
        "        | ab",
        "learned | cd",
        "        | e",
        "",
        "        | f",
        "learned | g",
    ]


def test_a_example_alone_has_lines_of_its_own() -> None:
    inputs = {"input": torch.tensor([1, 0, 2, 0, 0, 3, 9]), "n_tokens": torch.tensor(6)}
    labels = torch.tensor([N, N, 0, 0, 3, 4, N])
    assert sequence_text(inputs, labels, letters).splitlines() == [
        "1 example, 6 tokens and 1 of padding; 4 targets",
        "",
        "        | a",
        "        | b",
        "learned | ",
        "learned | ",
        "learned | cd",
    ]


def test_the_command_shows_what_is_learned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    root = Path(__file__).parents[3]
    sys.path.insert(0, str(root / "scripts"))

    monkeypatch.chdir(root)
    examples = tmp_path / "examples.jsonl"
    entries = [
        {"instruction": "Say yes.", "input": "", "output": "yes"},
        {"instruction": "Say no.", "input": "now", "output": "no"},
    ]
    examples.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    arguments = [
        "train_configs/tiny_8m.toml",
        "--samples=1",
        f"--training.dataset_path={examples}",
        "--data.no_shuffle",
        "--data.packing",
        "--training.seq_len=256",
        "--data.chat_template=alpaca",
    ]
    assert show_samples.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    columns = "columns instruction, output, input"
    assert lines[:3] == [
        f"-- {examples}: rows of kind 'alpaca', {columns}",
        "-- chat template 'alpaca'",
        "",
    ]
    assert lines[3].startswith("-- sequence 1: 2 examples, ")
    assert [line for line in lines if line.startswith("learned")] == [
        "learned | yes<|end|>",
        "learned | no<|end|>",
    ]
    assert "        | Say no." in lines
    assert show_samples.main([*arguments, "--data.chat_template=vicuna"]) == 2
    assert "data.chat_template is 'vicuna'; known: auto, plain" in capsys.readouterr().err


def test_the_command_shows_turns_of_tools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tokenizer's own template, which is taken by default, and the kind by the row."""
    monkeypatch.chdir(Path(__file__).parents[3])
    template = (
        "{% if tools %}Tools: {{ tools | tojson }}\n{% endif %}{% for m in messages %}"
        "{{ m.role }}>{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
        "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}assistant>{% endif %}"
    )
    folder = tokenizer_folder(tmp_path / "model", tokens=[], chat_template=template)
    examples = tmp_path / "examples.jsonl"
    turns = [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": "2 and 2?"},
        {"role": "assistant", "tool_calls": [{"name": "add"}]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    examples.write_text(json.dumps({"messages": turns, "tools": [{"name": "add"}]}) + "\n")
    arguments = [
        "train_configs/tiny_8m.toml",
        "--samples=1",
        "--training.dataset=auto",
        f"--training.dataset_path={examples}",
        f"--model.hf_assets_path={folder}",
        "--data.chat_template=auto",
        "--training.seq_len=256",
    ]
    assert show_samples.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        f"-- {examples}: rows of kind 'messages', columns messages, tools",
        "-- chat template 'tokenizer'",
    ]
    assert lines[5:-1] == [
        '        | Tools: [{"name": "add"}]',
        "        | system>Count.<|end|>",
        "        | user>2 and 2?<|end|>",
        "        | assistant>",
        'learned | [{"name": "add"}]<|end|>',
        "        | ",
        "        | tool>4<|end|>",
        "        | assistant>",
        "learned | It is 4.<|end|>",
    ]
