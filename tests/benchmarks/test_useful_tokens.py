"""The benchmark of learned tokens: its worker's turns, and whole runs of a tiny model."""

import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import useful_tokens
from turns import WORD

from torchtitan.freezing.launch import prepare

TRAINER = """
import sys, time
from turns import turns
steps = turns({cold}, 12.5)
for n in range(100):
    print("noise of a library")
    began = time.process_time()
    while time.process_time() - began < 0.02 * n:
        sum(range(1000))
    next(steps)
"""


def started(cold: int) -> subprocess.Popen[str]:
    folder = Path(useful_tokens.__file__).parent
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", TRAINER.format(cold=cold)], cwd=folder, **pipes)


def test_a_trainer_says_its_learned_tokens_then_the_time_of_each_step_that_was_asked_for() -> None:
    with started(cold=2) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        said = [float(line.removeprefix(WORD)) for line in told(process, 3)]
        process.stdin.close()
        assert not any(line.startswith(WORD) for line in process.stdout)
    assert process.returncode == 0
    # Two cold steps, then those of 0.04 and 0.06 s; noise can only add.
    assert said[0] == 12.5
    assert said[1] >= 0.04
    assert said[2] >= 0.06


def told(process: subprocess.Popen[str], n: int) -> Iterator[str]:
    for line in process.stdout or ():
        if line.startswith(WORD):
            yield line
            n -= 1
            if n == 0:
                return
            process.stdin.write("\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]


def test_each_system_is_told_beside_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two sequences of 100 learned tokens in 4 s, of 150 in 2, 3 and 4: ratios of pairs."""
    values = {"none": [100.0, 4.0, 4.0, 4.0], "lora": [150.0, 2.0, 3.0, 4.0]}
    monkeypatch.setattr(useful_tokens, "worker", lambda name, options: (v for v in values[name]))
    useful_tokens.main(
        ["model", "rows", "--systems", "lora", "TRL", "--steps", "3", "--sequences", "2"]
    )
    out = capsys.readouterr().out
    assert "TRL is left out" in out
    cells = [cell.strip() for cell in out.strip().splitlines()[-1].strip("|").split("|")]
    assert cells == ["lora", "300", "3.0", "4.0", "100.0", "2.00 (1.50..3.00)"]


def test_a_system_that_ends_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(useful_tokens.TRL, "TRL", 0)
    options = Namespace(
        trl_python="/bin/false", model="m", rows="r", seq_len=8, sequences=1, keys=[]
    )
    with pytest.raises(SystemExit, match="TRL has ended with status 1"):
        next(useful_tokens.worker("TRL", options))


ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "tests" / "assets" / "tokenizer"
ROWS = ROOT / "tests" / "assets" / "tiny_instruct" / "train.jsonl"
TINY = [
    "--model.flavor=8M", "--data.chat_template=plain", "--checkpoint.no-enable",
    "--checkpoint.no-initial_load_in_hf",
    "--parallelism.pipeline_parallel_first_stage_less_layers=1",
    "--parallelism.pipeline_parallel_last_stage_less_layers=1",
]  # fmt: skip


@pytest.mark.parametrize("name", useful_tokens.OURS)
def test_systems_are_alike_in_what_makes_their_tokens_comparable(name: str, tmp_path: Path) -> None:
    if name == "lora":
        pytest.importorskip("peft", reason="peft is not installed: the extra lora has it")
    options = Namespace(
        folder=tmp_path, model=TOKENIZER, rows=ROWS, seq_len=64, sequences=4, keys=TINY
    )
    kind, cold, *keys = useful_tokens.titan_command(name, options)[2:]
    plain, config = name == "TorchTitan", prepare(keys)
    assert kind == ("plain" if plain else "ours")
    assert int(cold) == (config.freezing.last_ramp_step if name == "default" else 1)
    assert config.training.global_batch_size == 4
    assert config.training.seq_len == 64
    assert config.training.mixed_precision_param == "float32"
    assert config.data.packing == (name != "none, unpacked")
    assert config.emulation.enable == (not plain)
    methods = {"default": "timelyfreeze", "lora": "lora"}
    assert config.freezing.method == methods.get(name, "none")


@pytest.mark.long
@pytest.mark.multiprocess
def test_ours_and_plain_torchtitan_run(capsys: pytest.CaptureFixture[str]) -> None:
    systems = ["--systems", "none, unpacked", "TorchTitan"]
    sizes = ["--steps", "2", "--sequences", "4", "--seq-len", "256"]
    useful_tokens.main([str(TOKENIZER), str(ROWS), *systems, *sizes, *TINY])
    *_, unpacked, plain = capsys.readouterr().out.strip().splitlines()
    assert unpacked.startswith("| none, unpacked |")
    assert plain.startswith("| TorchTitan |")
    learned = [float(row.split("|")[2]) for row in (unpacked, plain)]
    assert 0 < learned[0] < learned[1] < 4 * 256
