"""Plans held against runs of other pipelines, by closed formulas for even stages."""

import json
from pathlib import Path
from typing import Any

import pytest
from plan_error import HEAD, main

from tests.timelyfreeze.compare.run_folders import write_run
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import gpipe_order, one_f_one_b_order, order_to_csv
from timelyfreeze.whatif.bounds_file import PipelineNotes, bounds_file_text
from timelyfreeze.whatif.times import StageTimes, bounds_from_times

N_RANKS = 4
TWO_LAYERS = StageTimes(2.0, 4.0, 2.0, 2.0, 2.0, 0.0)


def save(folder: Path, order: Any, times: StageTimes, **notes: Any) -> Path:
    """A bounds file of even stages, with its order beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    dag = build_dag(order)
    bounds = bounds_from_times(dag, [times] * N_RANKS)
    said = PipelineNotes(ranks=4, first_stage="per_tensor", layers=(2, 2, 2, 2), **notes)
    (folder / "bounds.json").write_text(bounds_file_text(dag, bounds, said))
    (folder / "schedule.csv").write_text(order_to_csv(order))
    return folder / "bounds.json"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """GPipe with 12 microbatches; its own times are of no account."""
    folder = tmp_path / "runs" / "one"
    measured = {"schedule": "GPipe", "batch_ms_unfrozen": 99.0, "batch_ms": 54.0}
    write_run(folder, "timelyfreeze", emulated_ranks=4, **measured)
    settings = {
        "freezing": {"max_freeze_ratio": 1.0},
        "parallelism": {"pipeline_parallel_degree": N_RANKS},
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    save(folder, gpipe_order(N_RANKS, 12), TWO_LAYERS.over(100.0))
    return folder.parent


def test_another_schedule_and_number_of_microbatches(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order = one_f_one_b_order(N_RANKS, 8)
    source = save(tmp_path / "source", order, TWO_LAYERS, schedule="1F1B", processors=1.0)
    assert main([str(source), "--runs", str(run)]) == 0
    head, rule, row = capsys.readouterr().out.splitlines()
    assert len(head.split("|")) == len(rule.split("|")) == len(row.split("|")) == len(HEAD) + 2
    # 15 slots of 6 ms; with everything frozen of 4 ms. One processor was the source's, not the
    # run's.
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "run: 1F1B, 4 stages x 8", "GPipe", "12", "2,2,2,2", "1",
        "90.0", "99.0", "+10.0%", "60.0", "54.0", "-10.0%", "+50.0%", "+83.3%",
    ]  # fmt: skip


def test_what_is_missing_is_named(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "no.json"), "--runs", str(run)]) == 2
    assert "no.json cannot be read" in capsys.readouterr().err
    source = save(tmp_path / "source", gpipe_order(N_RANKS, 2), TWO_LAYERS)
    (tmp_path / "empty").mkdir()
    assert main([str(source), "--runs", str(tmp_path / "empty")]) == 2
    assert "--runs has no finished run" in capsys.readouterr().err
