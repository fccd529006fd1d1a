"""``timelyfreeze plan --splits time parameters memory``: what is split, and what is said."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.timelyfreeze.helpers.pipelines import simulate
from tests.timelyfreeze.whatif.stages_by_hand import FIRST, LAST, MIDDLE, MODEL
from tests.timelyfreeze.whatif.test_rank_memory import MODEL as BYTES
from timelyfreeze.cli.plan import main
from timelyfreeze.schedule.dag import build_dag
from timelyfreeze.schedule.order import Action, gpipe_order, one_f_one_b_order
from timelyfreeze.whatif.bounds_file import PipelineMetadata, bounds_file_text
from timelyfreeze.whatif.partition import PartParameters
from timelyfreeze.whatif.times import bounds_from_times

ROOT = Path(__file__).resolve().parents[3]
PROFILE = ROOT / "profiles" / "tiny_8m_1F1B" / "bounds.json"


@pytest.fixture
def bounds(tmp_path: Path) -> Path:
    """Twelve layers in four stages, whose last has a heavy head; all sizes are noted."""
    dag = build_dag(one_f_one_b_order(4, 8))
    notes = PipelineMetadata(
        ranks=4,
        layers=(3, 3, 3, 3),
        parameters=PartParameters(first=100, layers=(30,) * 12, last=82),
        memory=BYTES,
    )
    path = tmp_path / "bounds.json"
    times = bounds_from_times(dag, [FIRST, MIDDLE, MIDDLE, LAST])
    path.write_text(bounds_file_text(dag, times, notes))
    return path


def cases(path: Path, *arguments: str) -> dict[tuple[str, str], dict[str, Any]]:
    """What is planned, by schedule and split."""
    file = path.parent / "plan.json"
    assert main([str(path), "--r-max", "0.5", "--json", str(file), *arguments]) == 0
    return {(c["schedule"], c["split"]): c for c in json.loads(file.read_text())["cases"]}


def test_each_partition_has_its_split(bounds: Path) -> None:
    found = cases(
        bounds, "--schedules", "GPipe", "1F1B", "--splits", "default", "time", "parameters",
        "memory",
    )  # fmt: skip
    # 6 ms a layer, 2 ms of the embedding, 18 ms of the head.
    assert found["1F1B", "time"]["layers"] == [3, 4, 4, 1]
    # 100 of the embedding, 30 a layer, 82 of the head: 130, 150, 120 and 142. With a layer more
    # in front the first stage would have 160.
    assert found["1F1B", "parameters"]["layers"] == [1, 5, 4, 2]
    for schedule, order in (("GPipe", gpipe_order(4, 8)), ("1F1B", one_f_one_b_order(4, 8))):
        split = found[schedule, "time"]["layers"]
        times = MODEL.times(split)

        def duration_ms(action: Action, times: Any = times) -> float:
            return float(times[action.stage].bounds_of(action.kind)[1])

        ends = simulate(order, duration_ms)
        assert found[schedule, "time"]["step_ms"] == pytest.approx(max(e for _, e in ends.values()))
        assert found[schedule, "time"]["step_ms"] < 0.8 * found[schedule, "default"]["step_ms"]
    # All forwards first keep 8 microbatches of the head's 50 bytes; one after the other a single.
    assert found["GPipe", "memory"]["layers"][3] < found["1F1B", "memory"]["layers"][3]


def test_the_profile_in_the_repository_is_faster_split_by_time(tmp_path: Path) -> None:
    path = tmp_path / "bounds.json"
    path.write_text(PROFILE.read_text())
    found = cases(
        path, "--processors", "4", "--schedules", "1F1B", "--splits", "default", "time",
        "parameters", "memory",
    )  # fmt: skip
    default, by_time = found["1F1B", "default"], found["1F1B", "time"]
    assert by_time["step_ms"] < 0.98 * default["step_ms"]
    assert by_time["best_unfrozen_step_ms"] <= by_time["step_ms"]
    assert {tuple(case["layers"]) for case in found.values()} >= {(2, 3, 3, 2), (3, 3, 2, 2)}
    assert ("1F1B", "memory") in found


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("parameters", "does not tell how many parameters the parts of the model have"),
        ("memory", "does not tell how many bytes the parts of the model have"),
    ],
)
def test_a_file_without_sizes_says_what_makes_one(
    bounds: Path, split: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(bounds.read_text())
    del data["pipeline"]["parameters"], data["pipeline"]["memory"]
    bounds.write_text(json.dumps(data))
    assert main([str(bounds), "--schedules", "1F1B", "--splits", split, "default"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    made = "a file of `timelyfreeze profile CONFIG.toml` does"
    left_out = f"left out 1F1B, 8 microbatches, split {split}: bounds.json {expected}; {made}"
    assert said.count(left_out) == said.count(expected) == 1


def test_without_layers_there_is_nothing_to_split(
    bounds: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(bounds.read_text())
    del data["pipeline"]["layers"]
    bounds.write_text(json.dumps(data))
    assert main([str(bounds), "--schedules", "1F1B", "--splits", "time", "default"]) == 0
    assert "split time: layers cannot be moved" in capsys.readouterr().out
