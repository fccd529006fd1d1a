"""The recipes for other trainers, each in an environment of its own: scripts/test_hosts.sh.

Each trains a small random model on two CPU ranks, in one go and stopped and resumed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS, SAVED = 48, 32
FREEZING = {
    "last_warmup_step": 4, "last_monitor_step": 24, "last_ramp_step": 28, "min_gain": -1.0,
    "max_freeze_ratio": 0.8,
}  # fmt: skip
# Two batches of four microbatches in each step.
TITAN = [
    "--module=torchtitan_recipe", "--config=llama3_debugmodel_freezing", "--training.seq_len=64",
    f"--training.steps={STEPS}", "--training.local_batch_size=4", "--training.global_batch_size=8",
    "--parallelism.pipeline_parallel_degree=2", "--checkpoint.enable",
    f"--checkpoint.interval={SAVED}", "--debug.seed=1",
    *(f"--freezing.{name}={value}" for name, value in FREEZING.items()),
]  # fmt: skip
AUTOMODEL = {
    "dist_env": {"backend": "gloo"},
    "step_scheduler": {
        "global_batch_size": 8, "local_batch_size": 4, "max_steps": STEPS, "num_epochs": 1,
        "ckpt_every_steps": SAVED,
    },
    "distributed": {"pp_size": 2, "pipeline": {"pp_microbatch_size": 1}},
    "model": {
        "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
        "config": {
            "_target_": "transformers.LlamaConfig", "vocab_size": 4096, "hidden_size": 512,
            "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
        },
        "force_hf": True, "torch_dtype": "float32",
    },
    "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
    "dataset": {
        "_target_": "nemo_automodel.components.datasets.llm.mock_packed.MockPackedDatasetConfig",
        "num_blocks": 8 * STEPS, "block_size": 256, "vocab_size": 4096,
    },
    "dataloader": {"_target_": "torchdata.stateful_dataloader.StatefulDataLoader"},
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-3},
    "freezing": FREEZING,
}  # fmt: skip
COLOURS = re.compile(r"\x1b\[[\d;]*m")


def is_there(package: str, release: str) -> bool:
    try:
        return version(package).startswith(release)
    except PackageNotFoundError:
        return False


@dataclass(frozen=True)
class Run:
    """What a run has said, of all ranks."""

    said: str

    @cached_property
    def steps(self) -> dict[int, tuple[str, str]]:
        """Loss and norm of the gradient of each step; AutoModel counts from 0."""
        lines = re.findall(r"step:? *(\d+) .*?loss:? *([\d.]+) .*?grad_norm:? *([\d.]+)", self.said)
        return {int(step): (loss, norm) for step, loss, norm in lines}

    def line(self, name: str) -> str:
        """A line of the report, which comes once."""
        (found,) = re.findall(rf"^{name} +(.*)$", self.said, re.MULTILINE)
        return str(found)


def run(script: str, *arguments: str) -> Run:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
        "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", f"tests/examples/{script}",
        *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1100
    )
    said = COLOURS.sub("", done.stdout + done.stderr)
    assert done.returncode == 0, said[-6000:]
    return Run(said)


def in_titan(folder: Path, *, resumes: bool = False) -> Run:
    last = [f"--checkpoint.load_step={SAVED}"] if resumes else []
    return run("titan_on_cpu.py", *TITAN, f"--dump_folder={folder}", *last)


def in_automodel(folder: Path, *, resumes: bool = False) -> Run:
    """Train; what is resumed is the only checkpoint in a folder of its own."""
    config, checkpoints = folder / "config.yaml", folder / "whole"
    if resumes:
        saved, checkpoints = f"epoch_0_step_{SAVED - 1}", folder / "resumed"
        shutil.copytree(folder / "whole" / saved, checkpoints / saved)
    settings = {"enabled": True, "checkpoint_dir": str(checkpoints), "save_consolidated": False}
    config.write_text(json.dumps({**AUTOMODEL, "checkpoint": settings}))
    return run("automodel_on_cpu.py", "--config", str(config))


HOSTS = [
    pytest.param((in_titan, 1), id="titan", marks=pytest.mark.skipif(
        not is_there("torchtitan", "0.3."), reason="needs TorchTitan 0.3")),
    pytest.param((in_automodel, 0), id="automodel", marks=pytest.mark.skipif(
        not is_there("nemo-automodel", "0.7."), reason="needs NeMo AutoModel 0.7")),
]  # fmt: skip
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("host", HOSTS)
def test_a_resumed_run_freezes_and_learns_as_one_that_did_not_stop(
    tmp_path: Path, host: tuple[type, int]
) -> None:
    train, first = host
    whole, resumed = train(tmp_path), train(tmp_path, resumes=True)
    seen = whole.steps
    assert sorted(seen) == list(range(first, first + STEPS))
    assert float(seen[first + STEPS - 1][0]) < float(seen[first][0])
    # A narrow model was frozen whole, and clipped. Weights of a wide one learn all the time.
    assert any(float(norm) == 0.0 for _, norm in seen.values()) is (train is in_titan)
    assert resumed.steps == {n: values for n, values in seen.items() if n >= first + SAVED}
    assert "Freeze plan: batch" in whole.said
    assert "Freeze plan: batch" not in resumed.said
    for said in (whole, resumed):
        assert f"TimelyFreeze, step {STEPS}, phase stable" in said.said
        for name in ("batch measured", "batch predicted", "it missed by"):
            print(f"{train.__name__}: {name} {said.line(name)}")
    for name in ("planned ratios", "applied ratios"):
        assert resumed.line(name) == whole.line(name)


@pytest.mark.skipif(not is_there("torchtitan", "0.3."), reason="needs TorchTitan 0.3")
@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (
            ["--parallelism.pipeline_parallel_degree=1"],
            "pipeline_parallel_degree is 1 and loss is ",
        ),
        (["--config=chunked"], "pipeline_parallel_degree is 4 and loss is ChunkedLossWrapper.Con"),
    ],
)
def test_what_cannot_freeze_in_titan_is_refused(
    tmp_path: Path, arguments: list[str], value: str
) -> None:
    (tmp_path / "odd_recipe.py").write_text(
        "from dataclasses import replace\n"
        "from torchtitan_recipe import *\n"
        "def chunked():\n"
        "    return replace(llama3_debugmodel_freezing(), loss=llama3_debugmodel().loss)\n"
    )
    look = (
        "import sys; sys.path[:0] = ['examples', sys.argv.pop(1)]\n"
        "from torchtitan.config import ConfigManager\n"
        "ConfigManager().parse_args()"
    )
    done = subprocess.run(
        [sys.executable, "-c", look, str(tmp_path), *TITAN, "--module=odd_recipe", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode
    said = " ".join(done.stderr.replace("│", " ").split())  # upstream may draw a box around it
    assert value in said
    assert "freezing needs a degree above 1" in said
