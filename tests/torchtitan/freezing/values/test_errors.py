"""Errors of values are told before models, and what compiles them, are imported."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
HEAVY = ("datasets", "torch._inductor", "torch.distributed.pipelining", "torchao", "transformers",
         "triton")  # fmt: skip
# One wrong value for each kind of error, and the beginning of what is told.
REFUSED = {
    "--freezing.sed=1": "freezing.sed is no key of the configuration",
    "--freezing.seed=-1": "freezing.seed is -1",
    "--freezing.method=apd": "freezing.method is 'apd', nearest to 'apf'",
    "--freezing.preset=papr": "freezing.preset is 'papr'",
    "--freezing.apf.threshold=-2": "freezing.apf.threshold is -2",
    "--training.steps=0": "training.steps is 0",
    "--training.seq_len=127": "training.seq_len is 127",
    "--training.dataset_path=no.jsonl": "training.dataset_path is 'no.jsonl'; there is no such",
    "--parallelism.pipeline_parallel_schedule=2F1B": "parallelism.pipeline_parallel_schedule is",
    "--parallelism.pipeline_parallel_degree=3": "2 processes were started",
    "--model.name=llama": "model.name is 'llama'; known",
    "--model.hf_assets_path=no": "model.hf_assets_path is 'no', which is no folder",
}
PROGRAM = """
import io, json, sys
from contextlib import redirect_stdout
from timelyfreeze.cli import torchrun
from timelyfreeze.cli.train import train_command

told = {}
for word in json.loads(sys.argv[1]):
    words = train_command("train_configs/tiny_8m.toml", 2, [
        "--parallelism.pipeline_parallel_degree=2", "--freezing.method=apf",
        "--training.dataset=alpaca", word])
    sys.argv = words[2:]
    with redirect_stdout(io.StringIO()) as said:
        try:
            torchrun.main()
        except SystemExit as end:
            told[word] = [end.code, said.getvalue()]
print(json.dumps([told, sorted(sys.modules)]))
"""


def test_values_are_refused_without_a_model() -> None:
    command = [sys.executable, "-c", PROGRAM, json.dumps(list(REFUSED))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told, modules = json.loads(done.stdout.splitlines()[-1])
    for word, beginning in REFUSED.items():
        status, said = told[word]
        assert status == 2, word
        first, *errors = said.splitlines()
        assert first.startswith("error: The configuration has "), said
        assert any(error.startswith(f"  - {beginning}") for error in errors), said
    assert not [module for module in HEAVY if module in modules]
