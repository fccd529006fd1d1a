import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.timelyfreeze.pipelines import hand_order
from timelyfreeze.bounds import uniform_bounds
from timelyfreeze.dag import build_dag
from timelyfreeze.passes import CollectedFigures
from timelyfreeze.phases import Phase
from timelyfreeze.plan import FreezePlan, plan_from_ratios
from torchtitan.freezing.report import RunReport

FOLDER = Path("outputs/tb/run_1")


def make_plan() -> FreezePlan:
    """Two ranks, two microbatches: 90 ms unfrozen, 77.5 ms planned, 60 ms at best, by hand."""
    dag = build_dag(hand_order("two_by_two"))
    bounds = uniform_bounds(dag, forward_ms=10.0, backward_ms=(10.0, 20.0))
    ratios = {"1B0": 1.0, "0B1": 0.25}
    plan = plan_from_ratios(dag, bounds, [ratios.get(str(a), 0.0) for a in dag.actions])
    assert (plan.unfrozen_batch_ms, plan.batch_ms, plan.frozen_batch_ms) == (90.0, 77.5, 60.0)
    return plan


def controller(plan: FreezePlan | None, failure: str | None = None) -> Any:
    return SimpleNamespace(plan=plan, failure=failure)


def figures(batch_ms: dict[Phase, tuple[float, ...]]) -> CollectedFigures:
    return CollectedFigures(batch_ms, {0: 0.125, 1: 0.5}, average_freeze_ratio=0.2345)


def render(report: RunReport, of: Any, ranks: int = 2) -> dict[str, str]:
    """The report's lines, each by its first words, with single spaces."""
    text = report.render(of, ranks, FOLDER)
    assert text.startswith("\nRun report\n----------\n")
    assert text.endswith("\n")
    rows = [re.split(r"\s{2,}", line, maxsplit=1) for line in text.splitlines()[3:]]
    return {row[0]: re.sub(r"\s+", " ", row[-1]) for row in rows}


def test_the_report_of_a_frozen_run_by_hand() -> None:
    report = RunReport()
    # The first two steps of a phase run cold and do not count; of the others the median does.
    for phase, seconds in (
        (Phase.WARMUP, [9.0, 9.0, 0.2, 0.2]),
        (Phase.UPPER_BOUND, [9.0, 9.0, 0.4, 0.2]),
        (Phase.LOWER_BOUND, [0.01] * 4),
        (Phase.RAMP, [0.15] * 4),
        (Phase.STABLE, [9.0, 9.0, 0.16, 0.16, 7.0]),
    ):
        for each in seconds:
            report.add_step(phase, each, n_tokens=400)
    report.add_batches(figures({Phase.UPPER_BOUND: (90.0, 99.0), Phase.STABLE: (500.0,)}))
    report.add_batches(figures({Phase.UPPER_BOUND: (200.0,), Phase.STABLE: (77.5, 62.0)}))
    rows = render(report, controller(make_plan()))
    # 400 tokens in 0.2 s on 2 devices, then in 0.16 s.
    assert rows["without freezing"] == "1,000 tokens/s per device, 200.0 ms a step"
    assert rows["with freezing"] == "1,250 tokens/s per device, 160.0 ms a step"
    assert rows["gain"] == "+25.0% throughput"
    assert rows["limit"] == (
        "60.0 ms a batch with everything frozen (+50.0%); the plan reaches +16.1%"
    )
    text = re.sub(r"\s+", " ", report.render(controller(make_plan()), 2, FOLDER))
    assert "batch without freezing predicted 90.0 ms, measured 99.0 ms (+10.0%)" in text
    assert "batch with freezing predicted 77.5 ms, measured 77.5 ms (+0.0%)" in text
    assert "planned freeze ratio stage 0: 0.12 1: 0.50" in text
    assert "applied in the last step stage 0: 0.12 1: 0.50" in text
    assert "average freeze ratio 0.234 over all steps" in text
    assert rows["files"] == "outputs/tb/run_1"
    assert rows["TensorBoard"] == "tensorboard --logdir outputs/tb"


def test_uneven_padding_does_not_show_as_speed() -> None:
    report = RunReport()
    for n_tokens in (100, 500, 900, 100):
        report.add_step(Phase.WARMUP, 0.5, n_tokens)
    for _ in range(4):
        report.add_step(Phase.STABLE, 0.5, n_tokens=400)
    rows = render(report, controller(make_plan()), ranks=1)
    assert rows["without freezing"].startswith("800 tokens/s")
    assert rows["with freezing"].startswith("800 tokens/s")
    assert rows["gain"] == "+0.0% throughput"


def test_a_run_without_freezing_reports_its_speed_alone() -> None:
    report = RunReport()
    for seconds in (9.0, 9.0, 0.5, 0.5):
        report.add_step(None, seconds, n_tokens=1000)
    rows = render(report, None, ranks=4)
    assert rows["tokens/s per device"] == "500"
    assert set(rows) == {"tokens/s per device", "files", "TensorBoard"}


@pytest.mark.parametrize("n_steps", [0, 2])
def test_a_run_too_short_to_measure_says_so(n_steps: int) -> None:
    report = RunReport()
    for _ in range(n_steps):
        report.add_step(None, 1.0, n_tokens=10)
    assert "too few steps to measure" in render(report, None)


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (None, "not enough steps to measure"),
        ("status 'Time limit reached'", "status 'Time limit reached'"),
    ],
)
def test_a_run_without_a_plan_says_why(failure: str | None, text: str) -> None:
    report = RunReport()
    for _ in range(3):
        report.add_step(Phase.WARMUP, 0.5, n_tokens=10)
    rows = render(report, controller(None, failure))
    assert rows["no freeze plan"] == text
    assert "without freezing" in rows
    assert not {"with freezing", "gain", "limit"} & set(rows)


def test_what_was_never_measured_is_not_made_up() -> None:
    """A run that stopped in the ramp has a plan, but no stable step."""
    report = RunReport()
    text = re.sub(r"\s+", " ", report.render(controller(make_plan()), 2, FOLDER))
    assert "batch with freezing predicted 77.5 ms, not measured" in text
    assert "batch without freezing predicted 90.0 ms, not measured" in text
    assert "gain" not in text
    assert "applied" not in text
