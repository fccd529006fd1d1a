"""Damaged checkpoints, and places where nothing can be written, are told before a process waits."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.timelyfreeze.helpers.ranks import Ranks
from tests.torchtitan.helpers.job_configs import config
from tests.torchtitan.helpers.job_configs import make_job_config as job_config
from timelyfreeze.schedule.schedules import one_f_one_b_order
from torchtitan.checkpoints.finished import (
    damage,
    finished_steps,
    saved_keys,
    saved_values,
    unfinished_steps,
)
from torchtitan.freezing.checks.checkpoints import checkpoint_errors, output_errors


def write_checkpoint(folder: Path, step: int) -> Path:
    """A checkpoint of two tensors, by torch itself."""
    place = folder / f"step-{step}"
    state = {"a": torch.arange(1000.0), "b": torch.ones(500)}
    dcp.save(state, checkpoint_id=place, no_dist=True)
    return place


def saving_config(tmp_path: Path, **changes):
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
    assert list(checkpoint_errors(saving_config(tmp_path))) == []
    assert list(checkpoint_errors(saving_config(tmp_path, checkpoint__load_step=3))) == []
    assert list(checkpoint_errors(saving_config(tmp_path / "elsewhere"))) == []
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
    error = the_error(checkpoint_errors(saving_config(tmp_path)))
    assert f"{str(checkpoints / 'step-6')!r} is damaged: {words}" in error
    assert "checkpoint.load_step = 3 resumes from the one before" in error
    assert list(checkpoint_errors(saving_config(tmp_path, checkpoint__load_step=3))) == []
    spoil(checkpoints / "step-3")
    assert "resumes" not in the_error(checkpoint_errors(saving_config(tmp_path)))


def test_an_unfinished_checkpoint_is_none(checkpoints: Path, tmp_path: Path) -> None:
    (checkpoints / "step-6" / ".metadata").unlink()
    assert list(finished_steps(checkpoints)) == [3]
    assert list(unfinished_steps(checkpoints)) == [6]
    assert list(checkpoint_errors(saving_config(tmp_path))) == []
    error = the_error(checkpoint_errors(saving_config(tmp_path, checkpoint__load_step=6)))
    assert error.startswith("checkpoint.load_step is 6, of which ")
    assert error.endswith("finished are: 3")


def test_what_a_new_run_begins_from_is_looked_at_too(checkpoints: Path, tmp_path: Path) -> None:
    def begun(path: Path) -> list[str]:
        changes = {"checkpoint__initial_load_path": str(path)}
        return list(checkpoint_errors(saving_config(tmp_path / "new", **changes)))

    assert begun(checkpoints / "step-3") == []
    truncate(checkpoints / "step-6" / "__0_0.distcp")
    assert "__0_0.distcp has" in begun(checkpoints / "step-6")[0]
    assert begun(tmp_path / "nowhere")[0].endswith("and it is no folder")
    assert begun(tmp_path)[0].endswith("and it has no .metadata")


def test_a_place_where_nothing_can_be_written_is_told(tmp_path: Path) -> None:
    assert list(output_errors(saving_config(tmp_path / "not" / "there" / "yet"))) == []
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    (tmp_path / "outputs").write_text("a file")
    error = the_error(output_errors(saving_config(tmp_path)))
    assert error.startswith(f"job.dump_folder is {str(tmp_path / 'outputs')!r}, and ")
    assert "is no folder; name another" in error


@pytest.mark.skipif(not Path("/proc/sys").is_dir(), reason="no folder that not even root may use")
def test_a_read_only_folder_is_told(tmp_path: Path) -> None:
    changes = {"job__dump_folder": "/proc/sys"}
    error = the_error(output_errors(job_config(**changes)))
    assert error.startswith("job.dump_folder is '/proc/sys', and nothing can be written to ")
    assert error.endswith("; name another folder")


# A pipeline of two ranks and four microbatches, two processes for each.
ORDER = one_f_one_b_order(2, 4)


def write(folder: Path, last_step: int = 5, **data: Any) -> Path:
    """A checkpoint of step 6, by torch itself."""
    ranks = Ranks(ORDER, n_replicas=2)
    ranks.run(1, last_step)
    state = {"freezing": ranks.saved(), "dataloader": {"world_size": 2, **data}}
    place = folder / "outputs" / "checkpoint" / "step-6"
    dcp.save(state, checkpoint_id=place, no_dist=True)
    return place


def found(folder: Path, **changes: Any) -> list[str]:
    values = {
        "job__dump_folder": str(folder / "outputs"),
        "checkpoint__enable": True,
        "parallelism__pipeline_parallel_degree": 2,
        "parallelism__data_parallel_shard_degree": 4,
        "training__local_batch_size": 4,
        "training__dataset": "alpaca",
        **changes,
    }
    return list(checkpoint_errors(config(**values)))


@pytest.mark.parametrize("shard_degree", [1, 2, 4])
def test_any_number_of_replicas_goes_on_with_instruction_data(
    shard_degree: int, tmp_path: Path
) -> None:
    write(tmp_path)
    assert found(tmp_path, parallelism__data_parallel_shard_degree=shard_degree) == []


@pytest.mark.parametrize("last_step", [1, 3, 6, 9])
def test_another_pipeline_is_told_with_key_and_value(last_step: int, tmp_path: Path) -> None:
    place = write(tmp_path, last_step)
    (error,) = found(tmp_path, parallelism__pipeline_parallel_degree=4)
    assert error.startswith(f"{str(place)!r}: the checkpoint was saved by a pipeline of 2 ranks")
    assert "this run has parallelism.pipeline_parallel_degree 4" in error
    kept = found(tmp_path, training__local_batch_size=8)
    if last_step == 1:
        assert kept == [], "nothing was measured yet"
    else:
        assert "of 4 microbatches in a batch, this run has 8" in kept[0]
    anew = {"checkpoint__exclude_from_loading": ["freezing"]}
    assert found(tmp_path, parallelism__pipeline_parallel_degree=4, **anew) == []
    assert found(tmp_path, parallelism__pipeline_parallel_degree=4, freezing__method="none") == []


def test_text_data_goes_on_with_as_many_replicas_only(tmp_path: Path) -> None:
    place = write(tmp_path)
    text = {"training__dataset": "c4_test"}
    (error,) = found(tmp_path, **text)
    assert error.startswith(
        f"the checkpoint {str(place)!r} was saved with 2 data-parallel ranks, and this run has 4 "
        "(parallelism.data_parallel_replicate_degree x data_parallel_shard_degree)"
    )
    assert "'c4_test' (training.dataset)" in error
    assert found(tmp_path, parallelism__data_parallel_shard_degree=2, **text) == []
    replicated = {
        "parallelism__data_parallel_replicate_degree": 2,
        "parallelism__data_parallel_shard_degree": 1,
    }
    assert found(tmp_path, **replicated, **text) == []
    assert found(tmp_path, checkpoint__exclude_from_loading=["dataloader"], **text) == []


@pytest.mark.parametrize(("n_processes", "n_errors"), [("4", 0), ("8", 1), ("", 0)])
def test_the_rest_of_the_processes_counts(
    n_processes: str, n_errors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", n_processes)
    changes = {"training__dataset": "c4_test", "parallelism__data_parallel_shard_degree": -1}
    assert len(found(tmp_path, **changes)) == n_errors


def test_what_a_new_run_begins_from_is_looked_at_if_more_than_weights_are_taken(
    tmp_path: Path,
) -> None:
    place = write(tmp_path)
    changes = {
        "checkpoint__initial_load_path": str(place),
        "parallelism__pipeline_parallel_degree": 4,
    }
    assert found(tmp_path / "new", **changes) == []
    assert len(found(tmp_path / "new", checkpoint__initial_load_model_only=False, **changes)) == 1


@pytest.mark.parametrize(
    "text", ["", "{", "3", "[]", '{"tally": 1}', '{"tally": {"x": 1}}', '{"planner": {}}']
)
def test_a_foreign_state_is_told_without_a_stack_trace(text: str, tmp_path: Path) -> None:
    place = tmp_path / "outputs" / "checkpoint" / "step-6"
    state = {"freezing": {"rank_0": text}, "dataloader": {"world_size": 2}}
    dcp.save(state, checkpoint_id=place, no_dist=True)
    told = found(tmp_path)
    assert told[0].startswith(f"the checkpoint {str(place)!r} is damaged or foreign: ")


class Spy:
    def __reduce__(self) -> Any:
        return os.system, ("touch spied",)


def test_a_value_that_names_code_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = write(tmp_path, spy=Spy())
    assert "dataloader.spy" in saved_keys(place)
    with pytest.raises(ValueError, match=r"dataloader\.spy in .* cannot be read"):
        saved_values(place, ["dataloader.spy"])
    assert not Path("spied").exists()
    assert saved_values(place, ["dataloader.world_size"]) == {"dataloader.world_size": 2}
    with pytest.raises(ValueError, match=r"has no dataloader\.nothing"):
        saved_values(place, ["dataloader.nothing"])
