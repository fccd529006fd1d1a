"""A run that is called again once its steps are done: its report again, and nothing starts."""

from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchtitan.models.llama3 import Transformer
from torchtitan.models.llama3.model.args import TransformerModelArgs

from tests.torchtitan.helpers.job_configs import make_job_config
from timelyfreeze.files import write_whole
from torchtitan.checkpoints.finished import save_settings
from torchtitan.freezing.launch import launch
from torchtitan.hf.flavors import EXTRA_FLAVORS

ARGS = TransformerModelArgs(dim=16, n_layers=4, n_heads=2, vocab_size=2048)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments of a run of 4 steps, whose last checkpoint has the model alone."""
    monkeypatch.setitem(EXTRA_FLAVORS["llama3"], "tiny", ARGS)
    dcp.save(
        Transformer(ARGS).state_dict(), checkpoint_id=tmp_path / "checkpoint/step-4", no_dist=True
    )
    for name, folder in (("old", "checkpoint"), ("mine", "checkpoint"), ("other", "elsewhere")):
        config = make_job_config(checkpoint__enable=True, checkpoint__folder=folder)
        save_settings(tmp_path / "tb" / name, config.to_dict())
        write_whole(tmp_path / "tb" / name / "report.txt", f"Run report of {name}".encode())
    return [
        f"--job.dump_folder={tmp_path}", "--checkpoint.enable", "--model.flavor=tiny",
        "--training.dataset=alpaca", "--training.dataset_path=tests/assets/tiny_instruct",
    ]  # fmt: skip


@pytest.mark.parametrize("steps", [3, 4])
def test_its_report_is_told_again_once(
    run: list[str], steps: int, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [*run, f"--training.steps={steps}"]
    assert launch(arguments, local_rank=0) == 0
    said = capfd.readouterr().out
    assert said.startswith(f"This run is done at step 4 (training.steps is {steps}, ")
    assert "Run report of mine\n" in said
    assert launch(arguments, local_rank=1) == 0
    assert capfd.readouterr().out == ""
    assert not dist.is_initialized()


def test_a_run_that_was_killed_before_its_report_has_not_that_of_the_run_before(
    run: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tb/mine/report.txt").unlink()
    assert launch([*run, "--training.steps=4"], local_rank=0) == 0
    said = capfd.readouterr().out
    assert said.endswith("goes on; it ended before its report was written\n")


def test_with_more_steps_it_is_not_done(run: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert launch([*run, "--training.steps=5"], local_rank=0) == 2
    assert "step-4' holds the model alone" in capfd.readouterr().out


def test_another_model_is_not_done(run: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert launch([*run, "--training.steps=4", "--model.flavor=8M"], local_rank=0) == 2
    assert "it has 4 layers, this model 10" in capfd.readouterr().out
