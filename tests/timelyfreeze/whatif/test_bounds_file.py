"""Bounds files with and without notes, and what is said of broken ones."""

import functools
import json
import operator
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.timelyfreeze.helpers.pipelines import hand_order, random_bounds
from tests.timelyfreeze.whatif.test_rank_memory import MODEL as MODEL_BYTES
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import order_to_csv
from timelyfreeze.timing.bounds import bounds_from_json, bounds_to_json, uniform_bounds
from timelyfreeze.whatif.bounds_file import PipelineMetadata, bounds_file_text, read_bounds_file
from timelyfreeze.whatif.partition import PartParameters
from timelyfreeze.whatif.rank_memory import ModelBytes, PartBytes
from timelyfreeze.whatif.times import StageTimes

ORDER = hand_order("two_by_two")
DAG = build_dag(ORDER)
NOTES = PipelineMetadata(
    schedule="GPipe",
    ranks=2,
    processors=1.5,
    first_stage="per_tensor",
    skip_input_grads="off",
    layers=(4, 3),
    tokens_per_microbatch=2048,
    unit="images",
    stages=(StageTimes(1.0, 2.0, 1.0, 0.5, 1.5, 0.5), StageTimes(2.0, 4.0, 2.0, 2.0, 2.0, 0.0)),
    layer=StageTimes(0.5, 1.0, 0.5, 0.5, 0.5, 0.0),
    fixed=StageTimes(0.1, -0.1, 0.0, 0.0, -0.1, 0.0),
    parameters=PartParameters(first=100, layers=(30, 31, 32, 33, 34, 35, 36), last=82),
    memory=MODEL_BYTES,
)


@pytest.fixture
def plain() -> dict[str, Any]:
    """A right file with everything in it, to be broken."""
    bounds = uniform_bounds(DAG, forward_ms=1.0, backward_ms=(1.0, 2.0))
    data: dict[str, Any] = json.loads(bounds_file_text(DAG, bounds, NOTES))
    return data


def save(folder: Path, data: Any) -> Path:
    path = folder / "bounds.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def message(path: Path) -> str:
    with pytest.raises(ValueError, match=re.escape(str(path))) as error:
        read_bounds_file(path)
    return str(error.value)


def test_a_file_with_notes_comes_back(tmp_path: Path) -> None:
    bounds = replace(
        random_bounds(DAG, seed=3), interval_factor=1.25, captured=0.7, captured_mean=0.8
    )
    text = bounds_file_text(DAG, bounds, NOTES)
    file = read_bounds_file(save(tmp_path, text))
    assert file.metadata == NOTES
    assert file.table.interval_factor == bounds_from_json(DAG, text).interval_factor == 1.25
    assert file.table.captured == bounds_from_json(DAG, text).captured == 0.7
    assert file.table.captured_mean == bounds_from_json(DAG, text).captured_mean == 0.8
    assert (file.n_stages, file.n_microbatches, file.n_ranks) == (2, 2, 2)
    for i, action in enumerate(DAG.actions):
        assert file.table.bounds[action] == (bounds.min_ms[i], bounds.max_ms[i])
    assert file.stage_times() == NOTES.stages
    assert file.derived_kinds == ""


def unlike(n_layers: int) -> ModelBytes:
    """Layers of which each takes twice as much as the one before."""
    blocks = tuple(PartBytes(2**i, i, 3, 4, 5) for i in range(n_layers))
    return replace(MODEL_BYTES, blocks=blocks, outputs=tuple(range(n_layers + 1)))


def test_bytes_of_layers_that_differ_come_back(tmp_path: Path) -> None:
    notes = replace(NOTES, memory=unlike(7))
    text = bounds_file_text(DAG, random_bounds(DAG, seed=3), notes)
    assert read_bounds_file(save(tmp_path, text)).metadata == notes


def test_older_readers_see_the_bounds_alone() -> None:
    bounds = random_bounds(DAG, seed=4)
    again = bounds_from_json(DAG, bounds_file_text(DAG, bounds, NOTES))
    assert again.min_ms.tolist() == bounds.min_ms.tolist()
    assert again.max_ms.tolist() == bounds.max_ms.tolist()


def test_a_file_of_an_older_run_says_less(tmp_path: Path) -> None:
    path = save(tmp_path, bounds_to_json(DAG, random_bounds(DAG, seed=5)))
    file = read_bounds_file(path)
    assert file.metadata == PipelineMetadata()
    assert file.n_ranks is None
    assert file.derived_kinds == "I and W"
    (tmp_path / "schedule.csv").write_text(order_to_csv(ORDER))
    again = read_bounds_file(path)
    assert again.order == ORDER
    assert again.n_ranks == 2


def test_ranks_must_fit_the_schedule(tmp_path: Path, plain: dict[str, Any]) -> None:
    plain["pipeline"]["ranks"] = 1
    path = save(tmp_path, plain)
    assert read_bounds_file(path).n_ranks == 1, "two stages on a rank"
    (tmp_path / "schedule.csv").write_text(order_to_csv(ORDER))
    assert "pipeline.ranks is 1, which does not fit 2 in schedule.csv" in message(path)
    (tmp_path / "schedule.csv").unlink()
    plain["pipeline"]["ranks"] = 3
    assert "pipeline.ranks is 3, which does not fit 2 stages" in message(save(tmp_path, plain))


def test_times_of_stages_are_medians(tmp_path: Path, plain: dict[str, Any]) -> None:
    del plain["pipeline"]
    plain["bounds"]["1F0"] = {"min_ms": 3.0, "max_ms": 3.0}
    plain["bounds"]["1B1"] = {"min_ms": 2.0, "max_ms": 4.0}
    first, last = read_bounds_file(save(tmp_path, plain)).stage_times()
    assert first == StageTimes(1.0, 2.0, 1.0, 0.0, 2.0, 1.0)
    assert last == StageTimes(2.0, 3.0, 1.5, 1.5, 1.5, 0.0)


def test_a_split_backward_lacks_the_full_one(tmp_path: Path) -> None:
    dag = build_dag(hand_order("zero_bubble"))
    file = read_bounds_file(save(tmp_path, bounds_to_json(dag, random_bounds(dag, seed=6))))
    assert file.derived_kinds == "B"


def test_no_file_and_no_text(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in message(tmp_path / "bounds.json")
    path = tmp_path / "bounds.json"
    path.write_bytes(b"\xff\xfe\x00")
    assert "bounds.json is not JSON" in message(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"bounds": {\n  oops', "line 2 column 3"),
        ("[]", "it must be an object"),
        ('{"actions": {}}', 'has no object "bounds"'),
        ('{"bounds": []}', 'has no object "bounds"'),
        ('{"bounds": {}}', "bounds is empty"),
    ],
)
def test_foreign_files_are_named(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in message(save(tmp_path, text))


GONE = object()
BYTES = asdict(unlike(7))
PART = {"first": 1, "layers": [1] * 7, "last": 2}


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("bounds.3X5", {"min_ms": 1, "max_ms": 1}, "'3X5' is not an action"),
        ("bounds.0B0.min_ms", -1, "bounds.0B0.min_ms is -1; it must be 0 or more"),
        ("bounds.0B0.min_ms", 3, "bounds.0B0: min_ms 3.0 is above max_ms 2.0"),
        ("bounds.0F0.max_ms", 2, "bounds.0F0: min_ms 1.0 and max_ms 2.0 differ; F"),
        ("bounds.0F5", {"min_ms": 1, "max_ms": 1}, "bounds has no 0F2"),
        ("bounds.0I0", {"min_ms": 1, "max_ms": 1}, "either 0B0 or both 0I0 and 0W0"),
        ("bounds.1F1", GONE, "bounds has no 1F1"),
        ("bounds.1B0", GONE, "either 1B0 or both"),
        ("pipeline.ranks", 0, "pipeline.ranks is 0; it must be 1 or more"),
        ("pipeline.ranks", 2.0, "pipeline.ranks is 2.0"),
        ("pipeline.processors", 0, "pipeline.processors is 0; it must be above 0"),
        ("pipeline.first_stage", "odd", "first_stage is 'odd'; known: all_or_nothing, per_tensor"),
        ("pipeline.layers", [1, 2, 3], "pipeline.layers must be a list of 2"),
        ("pipeline.layers", [1, -2], "pipeline.layers[1] is -2"),
        ("pipeline.stages.1.frozen_backward_ms", 9.0, "stages[1]: B would take 9 ms frozen"),
        ("pipeline.parameters.layers", [1] * 6, "layers must be a list of 7, one for each layer"),
        ("pipeline.parameters.layers.6", -4, "pipeline.parameters.layers[6] is -4"),
        ("pipeline.parameters", {**PART, "first": -2}, "pipeline.parameters.first is -2"),
        ("pipeline.memory.head.kept", -1, "memory.head.kept is -1; it must be 0 or more"),
        ("pipeline.memory", {"message": 1.5}, "message is 1.5; it must be a whole number"),
        ("pipeline.memory", asdict(unlike(6)), "blocks must be a list of 7, one for each layer"),
        ("pipeline.memory", {**BYTES, "outputs": [1] * 7}, "memory.outputs must be a list of 8"),
        ("pipeline.memory", {**BYTES, "outputs": [-1] * 8}, "memory.outputs[0] is -1"),
    ],
)
def test_broken_values_are_named(tmp_path, plain, path, value, expected):
    *parents, key = (int(word) if word.isdigit() else word for word in path.split("."))
    place = functools.reduce(operator.getitem, parents, plain)
    if value is GONE:
        del place[key]
    else:
        place[key] = value
    assert expected in message(save(tmp_path, plain))


def test_an_order_of_another_run_is_refused(tmp_path: Path, plain: dict[str, Any]) -> None:
    path = save(tmp_path, plain)
    (tmp_path / "schedule.csv").write_text(order_to_csv(hand_order("zero_bubble")))
    text = message(path)
    assert "schedule.csv beside it do not have the same actions" in text
    assert "keep the two files of one run together" in text
    (tmp_path / "schedule.csv").write_text("0F0,hello")
    with pytest.raises(ValueError, match=r"schedule.csv: rank 0, position 1: 'hello'"):
        read_bounds_file(path)
