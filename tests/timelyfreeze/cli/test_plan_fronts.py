"""``timelyfreeze plan --frozen-layers``: table, files, and options that do not go with it."""

import csv
import json
from pathlib import Path

import pytest

from timelyfreeze.cli.plan import main
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import one_f_one_b_order
from timelyfreeze.whatif.bounds_file import PipelineMetadata, bounds_file_text
from timelyfreeze.whatif.times import StageTimes, bounds_from_times

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def bounds(tmp_path: Path) -> Path:
    """Four even stages of 2 layers: F 2 ms, B 4 ms."""
    dag = build_dag(one_f_one_b_order(4, 8))
    path = tmp_path / "bounds.json"
    times = [StageTimes(2.0, 4.0, 2.0, 2.0, 2.0, 0.0)] * 4
    notes = PipelineMetadata(ranks=4, layers=(2, 2, 2, 2))
    path.write_text(bounds_file_text(dag, bounds_from_times(dag, times), notes))
    return path


def test_a_row_for_each_schedule_and_number_of_layers(
    bounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = tmp_path / "fronts.json", tmp_path / "fronts.csv"
    arguments = ["--schedules", "GPipe", "1F1B", "--frozen-layers", "1", "6"]
    assert main([str(bounds), *arguments, "--json", str(files[0]), "--csv", str(files[1])]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    rows = [line for line in lines if line and line[0] in ("GPipe", "1F1B")]
    assert [(row[0], row[1]) for row in rows] == [
        ("GPipe", "1"), ("GPipe", "6"), ("1F1B", "1"), ("1F1B", "6"),
    ]  # fmt: skip
    # 11 x 6 unfrozen; 8 x 6 behind three stages, after 3 x 2 without a cache.
    assert rows[1][1:4] == ["6", "0.82", "0.73"]
    assert "unfrozen ms 66.0" in out
    # Two pipelines of two: 4 x 6 + 2 + 4 x 4. Ahead as with a cache.
    assert rows[1][6:] == ["0.64", "2", "x", "2", "0.73", "6,2"]
    # No stage is wholly in front: nothing runs ahead.
    assert rows[0][6:] == ["0.97", "1", "x", "4", "2,2,2,2"]
    out = out.replace("\n", " ")
    assert "gradients that replicas send each other are not in it" in out
    data = json.loads(files[0].read_text())
    case = data["cases"][1]
    assert (case["frozen_ms"], case["cached_ms"], case["run_ahead_ms"]) == (54.0, 48.0, 48.0)
    assert (case["shrunk_ranks"], case["shrunk_replicas"], case["shrunk_ms"]) == (2, 2, 42.0)
    assert case["shrunk_partition"] == "time"
    table = list(csv.DictReader(files[1].read_text().splitlines()))
    assert [float(row["frozen_ms"]) for row in table] == [c["frozen_ms"] for c in data["cases"]]
    assert table[0]["run_ahead_ms"] == ""
    assert table[1]["shrunk_layers"] == "6 2"
    # The split of the table is one that the option takes.
    best = rows[1][5]
    again = ["--schedules", "GPipe", "--frozen-layers", "6", "--splits", best]
    assert main([str(bounds), *again]) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if "GPipe" in line]
    resplit_ms = 66.0 * float(rows[1][4])
    assert float(row[4]) * float(row[5]) == pytest.approx(resplit_ms, abs=0.5)


def test_the_profile_in_the_repository_has_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "profiles" / "tiny_8m_1F1B" / "bounds.json"
    arguments = ["--frozen-layers", "8", "--schedules", "1F1B", "--processors", "4"]
    for by in ("parameters", "time"):
        assert main([str(path), *arguments, "--shrink-by", by]) == 0
        assert "2 x 2" in capsys.readouterr().out
