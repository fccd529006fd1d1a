"""What our checkpoint manager adds, beside what upstream's does without it."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torchtitan.components.checkpoint as titan_checkpoint
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torchtitan.config.job_config import Checkpoint

from tests.torchtitan.upstream.test_fixes import fresh
from torchtitan.checkpoints.manager import CheckpointError, SafeCheckpointManager

pytestmark = pytest.mark.usefixtures("one_rank")


class State:
    """Stands in for what else a checkpoint holds."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def manager(folder: Path, *, upstream: bool = False, value: int = 0, **settings: Any) -> Any:
    """A manager of a linear layer whose weights are all ``value``, and of a state with it."""
    layer = nn.Linear(2, 2)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, float(value))
    of = fresh(titan_checkpoint).CheckpointManager if upstream else SafeCheckpointManager
    config = {"enable": True, "interval": 100, "keep_latest_k": 0, **settings}
    made = of(
        dataloader=State(value),
        model_parts=[layer],
        optimizers=State(value),
        lr_schedulers=State(value),
        states={"train_state": State(value)},
        checkpoint_config=Checkpoint(**config),
        sd_adapter=None,
        base_folder=str(folder),
    )
    made.layer = layer
    return made


def weight(made: Any) -> float:
    return float(made.layer.weight.detach()[0, 0])


@pytest.fixture
def initial(tmp_path: Path) -> Path:
    """Where a checkpoint lies whose weights are all 7, to begin with."""
    manager(tmp_path / "first", value=7).save(100)
    return tmp_path / "first" / "checkpoint" / "step-100"


@pytest.mark.parametrize("upstream", [True, False])
def test_upstream_still_begins_with_random_weights_where_no_checkpoint_is_finished(
    upstream: bool, initial: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoint" / "step-10").mkdir(parents=True)
    made = manager(tmp_path, upstream=upstream, initial_load_path=str(initial))
    assert made.load() is not upstream
    assert weight(made) == (0.0 if upstream else 7.0)
    told = [r for r in caplog.records if "step-10 passed over" in r.getMessage()]
    assert len(told) == (0 if upstream else 1)


def test_an_unfinished_checkpoint_behind_a_finished_one_is_passed_over(tmp_path: Path) -> None:
    manager(tmp_path, value=3).save(100)
    (tmp_path / "checkpoint" / "step-200").mkdir()
    made = manager(tmp_path)
    assert made.load()
    assert weight(made) == 3.0
    assert made.states["train_state"].value == 3


@pytest.mark.parametrize("upstream", [True, False])
def test_upstream_still_calls_a_checkpoint_whole_while_it_is_written_over(
    upstream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = manager(tmp_path, upstream=upstream)
    made.save(100)
    metadata = tmp_path / "checkpoint" / "step-100" / ".metadata"
    assert metadata.is_file()
    seen = []
    write_data = FileSystemWriter.write_data

    def look(*args: Any) -> Any:
        seen.append(metadata.is_file())
        return write_data(*args)

    monkeypatch.setattr(FileSystemWriter, "write_data", look)
    made.save(100)
    assert seen == [upstream]
    assert metadata.is_file()


def test_a_checkpoint_can_be_saved_at_any_step_with_all_that_a_run_needs(tmp_path: Path) -> None:
    made = manager(tmp_path, value=5)
    assert made.save_now(17, last_step=False) == (
        "; its checkpoint is saved, and the same command goes on from there"
    )
    assert made.save_now(17, last_step=False) == "; the same command goes on from there"
    again = manager(tmp_path)
    assert again.load()
    assert (weight(again), again.states["train_state"].value) == (5.0, 5)
    made.save(18)
    assert not (tmp_path / "checkpoint" / "step-18").exists(), "the interval is what it was"


def test_a_full_disk_is_told_as_one(tmp_path: Path) -> None:
    """Where torch speaks of a position in its file: a file system that is full, not a limit."""
    mounted = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(tmp_path)]
    if subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a small file system")
    try:
        made = manager(tmp_path, value=5)
        made.save(100)
        made.states["train_state"].value = {str(n): torch.zeros(10**n) for n in (3, 4, 7)}
        with pytest.raises(CheckpointError, match=r"No space left on device.*resumes from .*-100"):
            made.save(200)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_where_training_ends_for_good_it_is_what_the_last_step_saves(tmp_path: Path) -> None:
    made = manager(tmp_path, last_save_model_only=True, export_dtype="bfloat16")
    assert made.save_now(17, last_step=True) == "; its checkpoint is saved"
    reader = torch.distributed.checkpoint.FileSystemReader(tmp_path / "checkpoint" / "step-17")
    saved = reader.read_metadata().state_dict_metadata
    assert set(saved) == {"weight", "bias"}
    assert saved["weight"].properties.dtype == torch.bfloat16


@pytest.mark.parametrize("key", ["enable", "load_only"])
def test_where_none_are_wanted_none_is_saved(key: str, tmp_path: Path) -> None:
    made = manager(tmp_path, **{key: key == "load_only"})
    text = made.save_now(17, last_step=False)
    value = "true" if key == "load_only" else "false"
    assert text == f"; nothing is saved, since checkpoint.{key} is {value}"
    assert list(tmp_path.rglob("step-*")) == []


def test_the_model_alone_is_passed_over_by_a_run_that_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = manager(tmp_path, value=3)
    made.save(100)
    made.states["train_state"].value = 5
    made.save(150, last_step=True)
    again = manager(tmp_path)
    assert again.load()
    assert again.states["train_state"].value == 3
    assert f"step-150 holds the model alone; the run goes on from {tmp_path}" in caplog.text
    whole = manager(tmp_path, last_save_model_only=False, value=7)
    whole.save(150, last_step=True)
    assert again.load()
    assert again.states["train_state"].value == 7


def test_where_all_that_is_there_is_the_model_alone_it_is_named(tmp_path: Path) -> None:
    manager(tmp_path).save(150, last_step=True)
    with pytest.raises(CheckpointError, match=r"step-150' holds the model alone \(checkpoint\.las"):
        manager(tmp_path).load()
    weights = ["train_state", "optimizer", "lr_scheduler", "dataloader"]
    assert manager(tmp_path, exclude_from_loading=weights).load()


def test_settings_that_differ_from_those_of_the_checkpoint_are_told_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    settings = {"debug": {"seed": 1, "deterministic": False}, "job": {"description": "a"}}
    made = manager(tmp_path)
    made.settings = settings
    made.save(100)
    for seed, told in ((1, []), (7, ["debug.seed is 7 and was 1"])):
        caplog.clear()
        again = manager(tmp_path)
        again.settings = {"debug": {"seed": seed, "deterministic": False}, "job": {"other": 3}}
        assert again.load()
        lines = [r.getMessage() for r in caplog.records if "goes on from" in r.getMessage()]
        assert [line.partition("another way: ")[2] for line in lines] == told


@pytest.mark.parametrize("upstream", [True, False])
def test_upstream_still_removes_what_only_looks_like_a_checkpoint(
    upstream: bool, tmp_path: Path
) -> None:
    mine = tmp_path / "checkpoint" / "best-of-step-100"
    mine.mkdir(parents=True)
    made = manager(tmp_path, upstream=upstream, keep_latest_k=2)
    for step in (100, 200, 300):
        made.save(step)
    made.close()
    left = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert left == [*([] if upstream else [mine.name]), "step-200", "step-300"]
