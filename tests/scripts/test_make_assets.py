"""The assets are what the script writes, and the script notices when they are not."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "tests" / "assets"


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.tools.make_assets", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_assets_are_what_the_script_writes() -> None:
    result = run("--check")
    assert result.returncode == 0, result.stderr


def test_check_names_a_file_that_differs_or_lacks(tmp_path: Path) -> None:
    assert run("--output", str(tmp_path)).returncode == 0
    rows = tmp_path / "tiny_chat" / "train.jsonl"
    rows.write_bytes(rows.read_bytes()[:-1])
    (tmp_path / "tokenizer" / "tokenizer.json").unlink()
    result = run("--check", "--output", str(tmp_path))
    assert result.returncode == 1
    differing = [line.split(" differs")[0] for line in result.stderr.splitlines()]
    assert differing == [str(rows), str(tmp_path / "tokenizer" / "tokenizer.json")]


def test_rows_are_distinct_and_sized_for_short_sequences() -> None:
    path = ASSETS / "tiny_instruct" / "train.jsonl"
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert 1100 <= len(rows) <= 1300
    assert path.stat().st_size < 400_000
    assert len({(row["instruction"], row["input"]) for row in rows}) == len(rows)
    words = [len(row["output"].split()) for row in rows]
    assert sum(20 <= count <= 120 for count in words) > 0.9 * len(words)


def test_arithmetic_in_the_answers_is_right() -> None:
    operations = {"+": int.__add__, "-": int.__sub__, "x": int.__mul__, "/": int.__floordiv__}
    checked = 0
    text = (ASSETS / "tiny_instruct" / "train.jsonl").read_text("utf-8")
    # Only whole equations: no further sign before or behind.
    equation = r"(?<![+x/-] )\b(\d+) ([+x/-]) (\d+) = (\d+)\b(?! [+x/-])"
    for a, sign, b, result in re.findall(equation, text):
        assert operations[sign](int(a), int(b)) == int(result), (a, sign, b, result)
        checked += 1
    assert checked > 500


def test_upstream_reads_the_prose_and_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

    from torchtitan.data.text.tokenizer import FolderTokenizer

    tokenizer = FolderTokenizer(str(ASSETS / "tokenizer"))
    assert tokenizer.get_vocab_size() <= 2048
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin|>", "<|end|>")
    monkeypatch.chdir(ROOT)  # upstream's path of c4_test is relative
    data = HuggingFaceTextDataset("c4_test", None, tokenizer, seq_len=64)
    batch, labels = next(iter(data))
    assert batch["input"].tolist()[1:] == labels.tolist()[:-1]
    text = json.loads((ASSETS / "c4_test" / "data.jsonl").read_text("utf-8").splitlines()[0])[
        "text"
    ]
    assert batch["input"][0] == tokenizer.bos_id
    assert text.startswith(tokenizer.decode(batch["input"].tolist()[1:20]))
