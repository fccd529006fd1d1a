"""A plan from the times of any framework, by its command line."""

import json
from pathlib import Path

import numpy as np
import plan_from_a_trace
import pytest

from timelyfreeze.schedule import one_f_one_b_order, parse_action

TRACE = Path(__file__).parents[2] / "examples" / "trace.csv"


def test_the_sample_gives_its_pipeline_and_bounds() -> None:
    dag, bounds = plan_from_a_trace.read_trace(TRACE)
    order = one_f_one_b_order(4, 8)
    assert dag.actions == tuple(action for row in order.ranks for action in row)
    longest = dict(zip(dag.actions, bounds.max_ms.tolist(), strict=True))
    assert longest[parse_action("1F0")] == pytest.approx(10.0, rel=0.05)
    assert longest[parse_action("1B0")] == pytest.approx(20.0, rel=0.05)
    shortest = dict(zip(dag.actions, bounds.min_ms.tolist(), strict=True))
    assert shortest[parse_action("1B0")] == pytest.approx(10.0, rel=0.05)
    assert shortest[parse_action("0B0")] < 1.0


def test_the_plan_keeps_the_cap_and_shortens_the_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    assert plan_from_a_trace.main([str(TRACE), "--max-freeze-ratio=0.5", f"--json={file}"]) == 0
    plan = json.loads(file.read_text())
    assert plan["frozen_batch_ms"] < plan["batch_ms"] < plan["unfrozen_batch_ms"]
    for stage in range(4):
        ratios = [r for name, r in plan["ratios"].items() if parse_action(name).stage == stage]
        assert len(ratios) == 8
        assert np.mean(ratios) <= 0.5 + 1e-6
    assert plan_from_a_trace.main([str(TRACE), "--max-freeze-ratio=0.5"]) == 0
    table = capsys.readouterr().out
    assert f"{plan['batch_ms']:8.1f} ms" in table
    assert table.count("  stage ") == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank,action\n0,0F0\n", "first line must be rank,action,start_ms,duration_ms,frozen"),
        ("{0}0,0F0,0.0,fast,no\n", "line 2: could not convert string to float: 'fast'"),
        ("{0}0,0F0,0.0,1.0,perhaps\n", "line 2: 'perhaps'"),
        ("{0}0,F,0.0,1.0,no\n", "line 2: "),
        ("{0}0,0F0,0.0,1.0,no\n0,0B0,1.0,2.0,no\n", "has no frozen sample"),
    ],
)
def test_a_trace_that_cannot_be_used_is_told(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text.replace("{0}", ",".join(plan_from_a_trace.COLUMNS) + "\n"))
    assert plan_from_a_trace.main([str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_a_ratio_out_of_range_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_from_a_trace.main([str(TRACE), "--max-freeze-ratio=1.2"]) == 2
    assert capsys.readouterr().err == "error: max_freeze_ratio is 1.2; it must lie in [0, 1]\n"
