"""Damaged checkpoints, and places where nothing can be written, are told before a process waits."""

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.torchtitan.helpers.job_configs import make_job_config as job_config
from torchtitan.checkpoints.finished import damage, finished_steps, unfinished_steps
from torchtitan.freezing.checks.checkpoints import checkpoint_errors, output_errors


def write_checkpoint(folder: Path, step: int) -> Path:
    """A checkpoint of two tensors, by torch itself."""
    place = folder / f"step-{step}"
    state = {"a": torch.arange(1000.0), "b": torch.ones(500)}
    dcp.save(state, checkpoint_id=place, no_dist=True)
    return place


def config(tmp_path: Path, **changes):
    return job_config(
        job__dump_folder=str(tmp_path / "outputs"), checkpoint__enable=True, **changes
    )


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    folder = tmp_path / "outputs" / "checkpoint"
    for step in (3, 6):
        write_checkpoint(folder, step)
    return folder


def the_error(errors) -> str:
    (error,) = list(errors)
    return error


def test_whole_checkpoints_and_none_at_all_are_fine(checkpoints: Path, tmp_path: Path) -> None:
    assert list(checkpoint_errors(config(tmp_path))) == []
    assert list(checkpoint_errors(config(tmp_path, checkpoint__load_step=3))) == []
    assert list(checkpoint_errors(config(tmp_path / "elsewhere"))) == []
    assert [damage(folder) for folder in finished_steps(checkpoints).values()] == [None, None]


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda place: truncate(place / "__0_0.distcp"), "__0_0.distcp has "),
        (lambda place: (place / "__0_0.distcp").unlink(), "it lacks __0_0.distcp"),
        (lambda place: truncate(place / ".metadata"), "its .metadata cannot be read"),
        (lambda place: os.truncate(place / ".metadata", 0), "its .metadata cannot be read"),
        (lambda place: (place / ".metadata").write_bytes(b"\x00" * 99), "its .metadata cannot"),
        (lambda place: (place / ".metadata").write_bytes(pickle.dumps([1])), "its .metadata ca"),
    ],
)
def test_a_damaged_checkpoint_is_named_with_the_one_before_it(
    spoil, words: str, checkpoints: Path, tmp_path: Path
) -> None:
    spoil(checkpoints / "step-6")
    error = the_error(checkpoint_errors(config(tmp_path)))
    assert f"{str(checkpoints / 'step-6')!r} is damaged: {words}" in error
    assert "checkpoint.load_step = 3 resumes from the one before" in error
    assert list(checkpoint_errors(config(tmp_path, checkpoint__load_step=3))) == []
    spoil(checkpoints / "step-3")
    assert "resumes" not in the_error(checkpoint_errors(config(tmp_path)))


def test_an_unfinished_checkpoint_is_none(checkpoints: Path, tmp_path: Path) -> None:
    (checkpoints / "step-6" / ".metadata").unlink()
    assert list(finished_steps(checkpoints)) == [3]
    assert list(unfinished_steps(checkpoints)) == [6]
    assert list(checkpoint_errors(config(tmp_path))) == []
    error = the_error(checkpoint_errors(config(tmp_path, checkpoint__load_step=6)))
    assert error.startswith("checkpoint.load_step is 6, of which ")
    assert error.endswith("finished are: 3")


def test_what_a_new_run_begins_from_is_looked_at_too(checkpoints: Path, tmp_path: Path) -> None:
    def begun(path: Path) -> list[str]:
        changes = {"checkpoint__initial_load_path": str(path)}
        return list(checkpoint_errors(config(tmp_path / "new", **changes)))

    assert begun(checkpoints / "step-3") == []
    truncate(checkpoints / "step-6" / "__0_0.distcp")
    assert "__0_0.distcp has" in begun(checkpoints / "step-6")[0]
    assert begun(tmp_path / "nowhere")[0].endswith("and it is no folder")
    assert begun(tmp_path)[0].endswith("and it has no .metadata")


def test_a_place_where_nothing_can_be_written_is_told(tmp_path: Path) -> None:
    assert list(output_errors(config(tmp_path / "not" / "there" / "yet"))) == []
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    (tmp_path / "outputs").write_text("a file")
    error = the_error(output_errors(config(tmp_path)))
    assert error.startswith(f"job.dump_folder is {str(tmp_path / 'outputs')!r}, and ")
    assert "is no folder; name another" in error


@pytest.mark.skipif(not Path("/proc/sys").is_dir(), reason="no folder that not even root may use")
def test_a_read_only_folder_is_told(tmp_path: Path) -> None:
    changes = {"job__dump_folder": "/proc/sys"}
    error = the_error(output_errors(job_config(**changes)))
    assert error.startswith("job.dump_folder is '/proc/sys', and nothing can be written to ")
    assert error.endswith("; name another folder")
