import json
from pathlib import Path

import pytest
import torch

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
    assert lines[0].startswith("-- sequence 1: 2 examples, ")
    assert [line for line in lines if line.startswith("learned")] == [
        "learned | yes<|end|>",
        "learned | no<|end|>",
    ]
    assert "        | Say no." in lines
    assert show_samples.main([*arguments, "--data.chat_template=vicuna"]) == 2
    assert "data.chat_template is 'vicuna'; known: auto, plain" in capsys.readouterr().err
