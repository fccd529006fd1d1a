import json
from pathlib import Path

import pytest
import torch

from tests.torchtitan.helpers.chat_tokenizers import tokenizer_folder
from torchtitan.data.sequences import sequence_text
from torchtitan.data.turns import IGNORE_INDEX
from torchtitan.freezing import samples as show_samples

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
