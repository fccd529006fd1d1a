"""Damaged checkpoints, and places where nothing can be written, are told before a process waits."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from tests.torchtitan.helpers.checkpoints import (
    found,
    save,
    saved_config,
    small_model,
    weights,
    write,
)
from tests.torchtitan.helpers.job_configs import make_job_config as job_config
from timelyfreeze.files import shown
from torchtitan.checkpoints.finished import (
    all_steps,
    damage,
    finished_steps,
    save_settings,
)
from torchtitan.freezing.checks.checkpoints import (
    checkpoint_errors,
    is_done,
    output_errors,
    start_of,
)

_small_model = small_model


def write_checkpoint(folder: Path, step: int) -> Path:
    return save(folder / f"step-{step}", step)


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
    assert all_steps(checkpoints).keys() - finished_steps(checkpoints).keys() == {6}
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


def only_weights(checkpoints: Path, step: int) -> Path:
    place = checkpoints / f"step-{step}"
    dcp.save(weights(), checkpoint_id=place, no_dist=True)
    return place


def test_a_run_with_all_its_steps_behind_it_is_done(checkpoints: Path, tmp_path: Path) -> None:
    for last in (6, 9):
        for steps, done in ((last - 1, True), (last, True), (last + 1, False)):
            assert is_done(saving_config(tmp_path, training__steps=steps)) is done
        only_weights(checkpoints, 9)
    assert list(checkpoint_errors(saving_config(tmp_path, training__steps=9))) == []
    earlier = saving_config(tmp_path, training__steps=9, checkpoint__load_step=3)
    assert not is_done(earlier), "it trains once more from there"
    again = saving_config(tmp_path, training__steps=6)
    again.checkpoint.exclude_from_loading = ["train_state"]
    assert not is_done(again)
    assert not is_done(saving_config(tmp_path / "elsewhere"))


def test_with_more_steps_a_run_goes_on_from_what_holds_more_than_the_model(
    checkpoints: Path, tmp_path: Path
) -> None:
    place = only_weights(checkpoints, 9)
    longer = saving_config(tmp_path, training__steps=12)
    assert start_of(longer).step == 6
    assert list(checkpoint_errors(longer)) == []
    asked_for = saving_config(tmp_path, training__steps=12, checkpoint__load_step=9)
    error = the_error(checkpoint_errors(asked_for))
    assert error.startswith(f"the checkpoint {str(place)!r} holds the model alone (checkpoint.last")
    for step in (3, 6):
        only_weights(checkpoints, step)
    assert the_error(checkpoint_errors(longer)) == error
    # A new run takes the weights.
    changes = {"checkpoint__initial_load_path": str(place)}
    new = saving_config(tmp_path / "new", **changes)
    assert list(checkpoint_errors(new)) == []
    new.checkpoint.initial_load_model_only = False
    assert "holds the model alone" in the_error(checkpoint_errors(new))


@pytest.mark.parametrize("name", ["old-step-9", "step-9.bak", "step-009", "step-"])
def test_names_that_only_look_like_a_checkpoint_are_none(
    name: str, checkpoints: Path, tmp_path: Path
) -> None:
    write_checkpoint(checkpoints, 9).rename(checkpoints / name)
    assert start_of(saving_config(tmp_path)).step == 6


def test_a_file_in_place_of_the_checkpoints_is_told(tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "checkpoint").write_text("")
    error = the_error(output_errors(saving_config(tmp_path)))
    assert error.startswith("checkpoint.folder is 'checkpoint', and ")
    assert "is no folder" in error


@pytest.mark.parametrize(
    ("flavor", "unlike"),
    [
        ("deep", "it has 2 layers, this model 3"),
        ("wide", "tok_embeddings.weight is [64, 16] there, [64, 32] in this model"),
    ],
)
def test_another_model_is_told_with_key_and_both_values(
    flavor: str, unlike: str, checkpoints: Path, tmp_path: Path
) -> None:
    changes = {"model__flavor": flavor}
    error = the_error(checkpoint_errors(saving_config(tmp_path, **changes)))
    assert error.startswith(f"model.flavor is '{flavor}': the checkpoint ")
    assert f"step-6' belongs to another model: {unlike};" in error
    save_settings(checkpoints / "step-6", saving_config(tmp_path).to_dict())
    error = the_error(checkpoint_errors(saving_config(tmp_path, **changes)))
    assert error.startswith(f"model.flavor is '{flavor}' and was 'debugmodel': the checkpoint ")


# A run that freezes, at step 6; last_warmup_step is 2, so that times are there.
FROZEN = {"freezing__method": "timelyfreeze+apf", "freezing__last_warmup_step": 2}


@pytest.mark.parametrize(
    ("key", "then", "now", "state"),
    [
        ("optimizer.lr", 8e-4, 1e-5, '"lr_scheduler", "optimizer"'),
        ("optimizer.weight_decay", 0.1, 0.0, '"optimizer"'),
        ("training.dataset", "alpaca", "c4_test", '"dataloader"'),
        ("training.dataset_path", None, "rows.jsonl", '"dataloader"'),
        ("data.seed", 42, 7, '"dataloader"'),
        ("data.validation_fraction", 0.0, 0.5, '"dataloader"'),
        ("freezing.method", "timelyfreeze+apf", "apf", '"freezing"'),
        ("freezing.last_warmup_step", 2, 7, '"freezing"'),
        ("freezing.max_freeze_ratio", "auto", 0.5, '"freezing"'),
        ("freezing.gradient_rank", 0, [16, 32], '"freezing"'),
        ("parallelism.pipeline_parallel_schedule", "1F1B", "GPipe", '"freezing"'),
        ("training.seq_len", 2048, 64, '"freezing"'),
        ("training.mixed_precision_param", "bfloat16", "float32", '"freezing"'),
        ("activation_checkpoint.mode", "none", "full", '"freezing"'),
    ],
)
def test_what_a_checkpoint_brings_along_cannot_differ(
    key: str, then: Any, now: Any, state: str, tmp_path: Path
) -> None:
    place = write(tmp_path)
    save_settings(place, saved_config(**FROZEN).to_dict())
    section, _, name = key.partition(".")
    changed = {**FROZEN, f"{section}__{name}": now, "debug__seed": 3}
    told = [error for error in found(tmp_path, **changed) if error.startswith(f"{key} is ")]
    (error,) = told
    assert error.startswith(
        f"{key} is {now!r} and was {shown(then)}: the checkpoint {str(place)!r}"
    )
    assert f"checkpoint.exclude_from_loading = [{state}]" in error
    excluded = {"checkpoint__exclude_from_loading": ["optimizer", "lr_scheduler", "dataloader"]}
    excluded["checkpoint__exclude_from_loading"].append("freezing")
    assert found(tmp_path, **changed, **excluded) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"debug__seed": 7, "freezing__seed": 7, "training__steps": 2000},
        {"lr_scheduler__warmup_steps": 3, "freezing__last_ramp_step": 999, "metrics__log_freq": 7},
    ],
)
def test_what_else_differs_is_no_error(changes: dict[str, Any], tmp_path: Path) -> None:
    save_settings(write(tmp_path), saved_config().to_dict())
    assert found(tmp_path, **changes) == []


def test_phases_may_differ_as_long_as_nothing_was_measured(tmp_path: Path) -> None:
    save_settings(write(tmp_path, last_step=1), saved_config().to_dict())
    assert found(tmp_path, freezing__last_warmup_step=8) == []
    assert len(found(tmp_path, freezing__last_warmup_step=5)) == 1, "step 6 should be measured"


def test_a_checkpoint_without_freezing_is_told(tmp_path: Path) -> None:
    save(tmp_path / "outputs" / "checkpoint" / "step-6", 6)
    (error,) = found(tmp_path)
    assert "has no state for freezing.method 'timelyfreeze': it was saved without freezing" in error
    assert found(tmp_path, freezing__method="none") == []
    assert found(tmp_path, checkpoint__exclude_from_loading=["freezing"]) == []


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
