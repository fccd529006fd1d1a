"""What a checkpoint holds of freezing and data, and a run that cannot go on from it."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.torchtitan.helpers.checkpoints import found, save, small_model, write
from timelyfreeze.settings import ElasticSettings
from torchtitan.checkpoints.finished import saved_keys, saved_values

_small_model = small_model


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
    again = {"checkpoint__exclude_from_loading": ["freezing"]}
    assert found(tmp_path, parallelism__pipeline_parallel_degree=4, **again) == []
    assert found(tmp_path, parallelism__pipeline_parallel_degree=4, freezing__method="none") == []
    moves = {"freezing__elastic": ElasticSettings(enable=True)}
    assert found(tmp_path, parallelism__pipeline_parallel_degree=4, **moves) == []


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
    save(place, 6, freezing={"rank_0": text}, dataloader={"world_size": 2})
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
