import ast
import json
import math
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from tests.test_layers import imports
from tests.torchtitan.helpers.summaries import make_summary
from timelyfreeze.records import summary as module
from timelyfreeze.records.summary import SUMMARY_FILE, RunSummary, read_summary, summary_to_json


def read(folder: Path, text: str) -> RunSummary:
    (folder / SUMMARY_FILE).write_text(text)
    return read_summary(folder)


def test_a_summary_comes_back_as_it_was_written(tmp_path: Path) -> None:
    summary = make_summary(
        tokens_per_second=1250.5,
        batch_ms=77.5,
        planned_stage_ratios={0: 0.125, 1: 0.5},
        stage_ratios={0: 0.0, 1: 0.25},
        average_freeze_ratio=0.1,
        steps_done=100,
        failure="status 'Time limit reached'",
        counts_padding=False,
        seed=None,
    )
    values = json.loads(summary_to_json(summary))
    assert list(values) == [field.name for field in fields(RunSummary)]
    assert values["seed"] is values["validation_loss"] is None, "a flat object, null if unknown"
    again = read(tmp_path, json.dumps(values))
    assert again == summary
    assert again.stage_ratios == {0: 0.0, 1: 0.25}, "stages are numbers again"
    del values["validation_loss"]
    assert read(tmp_path, json.dumps(values)) == summary
    nan = read(tmp_path, summary_to_json(make_summary(train_loss=math.nan))).train_loss
    assert math.isnan(nan), "it is not taken for a missing one"
    with pytest.raises(FrozenInstanceError):
        again.steps = 1


def test_what_is_no_summary_is_refused(tmp_path: Path) -> None:
    values = json.loads(summary_to_json(make_summary()))
    del values["steps"]
    with pytest.raises(ValueError, match=r"the whole lacks steps"):
        read(tmp_path, json.dumps(values))
    values["steps"] = "10"
    with pytest.raises(ValueError, match="steps is '10'; it must be a whole"):
        read(tmp_path, json.dumps(values))
    values |= {"steps": 10, "stage_ratios": {"first": 0.5}}
    with pytest.raises(
        ValueError, match="a key of stage_ratios is 'first'; it must be a whole number"
    ):
        read(tmp_path, json.dumps(values))
    with pytest.raises(ValueError, match="unknown fields: mood, speed"):
        read(tmp_path, '{"speed": 1, "mood": 2}')


def test_reading_summaries_needs_the_standard_library_alone() -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    names = {name.split(".")[0] for name, _ in imports(tree)}
    ours = {"json", "pathlib", "timelyfreeze", "typing"}
    assert names <= {"__future__", "collections", "contextlib", "dataclasses", "datetime"} | ours
