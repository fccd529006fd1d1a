"""The recipe for TorchTitan 0.3, from an environment of its own: see docs/torchtitan_recipe.md.

python -m pytest --noconftest -m multiprocess tests/examples/test_torchtitan_recipe.py
"""

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
try:
    IS_THERE = version("torchtitan").startswith("0.3.")
except PackageNotFoundError:
    IS_THERE = False
pytestmark = [
    pytest.mark.skipif(not IS_THERE, reason="needs TorchTitan 0.3 in an environment of its own"),
    pytest.mark.multiprocess,
    pytest.mark.timeout(1200),
]
STEPS, SAVED = 20, 14
# Two batches of four microbatches in each step. Everything is frozen in some of steps 3 to 10.
SMALL = [
    "--config=llama3_debugmodel_freezing", "--training.seq_len=64", f"--training.steps={STEPS}",
    "--training.local_batch_size=4", "--training.global_batch_size=8",
    "--parallelism.pipeline_parallel_degree=2", "--freezing.last_warmup_step=2",
    "--freezing.last_monitor_step=10", "--freezing.last_ramp_step=12",
    "--freezing.min_gain=-1", "--freezing.max_freeze_ratio=0.8",
    "--checkpoint.enable", f"--checkpoint.interval={SAVED}", "--debug.seed=1",
]  # fmt: skip
COLOURS = re.compile(r"\x1b\[[\d;]*m")


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
        "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "tests/examples/titan_on_cpu.py",
        "--module=torchtitan_recipe", *SMALL, f"--dump_folder={folder}", *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1100
    )
    return done.returncode, COLOURS.sub("", done.stdout + done.stderr)


def steps(said: str) -> dict[int, tuple[float, float]]:
    """Loss and norm of the gradient of each step, of the rank that has the loss."""
    lines = re.findall(r"step: *(\d+) *loss: *([\d.]+) *grad_norm: *([\d.]+)", said)
    return {int(step): (float(loss), float(norm)) for step, loss, norm in lines}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("whole")
    status, said = run(folder)
    assert status == 0, said[-6000:]
    return folder, said


def test_it_trains_plans_and_reports(whole: tuple[Path, str]) -> None:
    _, said = whole
    seen = steps(said)
    assert sorted(seen) == list(range(1, STEPS + 1))
    assert seen[STEPS][0] < seen[1][0]
    assert "Freeze plan: batch" in said
    assert said.count(f"TimelyFreeze, step {STEPS}, phase stable") == 1
    for line in ("batch measured", "batch predicted", "planned ratios", "applied ratios"):
        assert line in said


def test_a_step_without_gradients_on_any_rank_is_clipped_and_learns_nothing(
    whole: tuple[Path, str],
) -> None:
    _, said = whole
    assert any(norm == 0.0 for _, norm in steps(said).values())


def test_a_resumed_run_goes_on_with_its_plan_as_if_it_had_not_stopped(
    whole: tuple[Path, str],
) -> None:
    folder, said = whole
    status, resumed = run(folder, f"--checkpoint.load_step={SAVED}")
    assert status == 0, resumed[-6000:]
    assert "Freeze plan: batch" not in resumed
    seen = steps(said)
    assert steps(resumed) == {step: seen[step] for step in range(SAVED + 1, STEPS + 1)}
    assert f"TimelyFreeze, step {STEPS}, phase stable" in resumed


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--parallelism.pipeline_parallel_degree=1"], "freezing needs a pipeline, and"),
        (["--config=chunked"], "loss is a ChunkedLossWrapper, which goes backward through lm_head"),
    ],
)
def test_what_cannot_freeze_is_refused(tmp_path: Path, arguments: list[str], why: str) -> None:
    (tmp_path / "odd_recipe.py").write_text(
        "from torchtitan_recipe import *\n"
        "def chunked():\n"
        "    recipe = llama3_debugmodel_freezing()\n"
        "    recipe.loss = llama3_debugmodel().loss\n"
        "    return recipe\n"
    )
    look = (
        "import sys; sys.path[:0] = ['examples', sys.argv.pop(1)]\n"
        "from torchtitan.config import ConfigManager\n"
        "from torchtitan_recipe import check\n"
        "check(ConfigManager().parse_args())"
    )
    done = subprocess.run(
        [sys.executable, "-c", look, str(tmp_path), "--module=odd_recipe", *SMALL, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert why in done.stderr
