"""The page on a run, from metrics and files made by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.torchtitan.helpers.job_configs import put
from tests.torchtitan.helpers.report_runs import run_in
from tests.torchtitan.helpers.summaries import make_summary
from timelyfreeze.records.tables import FrozenCount
from torchtitan.freezing.report.reports import render_page, render_report
from torchtitan.freezing.report.times import Outcome
from torchtitan.settings.job_config import JobConfig

MEASURED: dict[str, Any] = {
    "steps_done": 100,
    "tokens_per_second_unfrozen": 1000.0,
    "tokens_per_second": 1250.0,
    "step_ms_unfrozen": 200.0,
    "step_ms": 160.0,
    "step_ms_predicted": 150.0,
    "batch_ms_unfrozen_predicted": 90.0,
    "batch_ms_unfrozen": 99.0,
    "batch_ms_predicted": 77.5,
    "batch_ms": 77.5,
    "interval_factor": 1.25,
    "predicts_for": "4 ranks that share 2 cores",
    "all_frozen_batch_ms": 60.0,
    "planned_gain": 0.16,
    "upper_bound_gain": 0.5,
    "planned_stage_ratios": {0: 0.125, 1: 0.5},
    "stage_ratios": {0: 0.25, 1: 0.75},
    "average_freeze_ratio": 0.2345,
    "steps_factor": 1.15,
    "time_to_loss": 0.92,
    "kappa": 0.8,
    "p_eff": 0.5,
    "kappa_over_p_eff": 1.6,
    "never_updated_tensors": 0.25,
    "never_updated_elements": 0.1,
    "train_loss": 2.5,
    "seconds": 1234.5,
    "peak_memory_gib": 1.5,
}
COUNTS = [
    FrozenCount(1, 0, "a", 10, 8, 8),
    FrozenCount(1, 0, "b", 30, 8, 4),
    FrozenCount(0, 1, "c", 40, 8, 2),
]


def rows_of(page: str) -> dict[str, str]:
    """Second cell of each row by the first."""
    cells = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    return {row[0]: row[1] for row in cells if len(row) == 2}


def page_of(folder: Path, counts: list[FrozenCount] | None = None, **metrics: Any) -> str:
    config = JobConfig()
    put(config, "freezing", method=metrics.get("method", "timelyfreeze"))
    config.training.dataset_path = "./a|b"
    return render_page(make_summary(**metrics), config.to_dict(), folder, counts or [])


def test_a_run_with_freezing(tmp_path: Path) -> None:
    page = page_of(tmp_path, COUNTS, **MEASURED, gradient_rank=64)
    rows = rows_of(page)
    assert rows["frozen weights learn in"] == "64 directions each"
    assert rows["freezing.gradient_rank"] == "auto"
    assert page.startswith("# llama3 8M, 1F1B, timelyfreeze\n\n100 of 100 steps, begun 2026-11-21")
    assert rows["time to a loss, of that without freezing, estimated"] == "0.92"
    assert rows["steps to a loss, of those without freezing, estimated"] == "1.15"
    assert rows["gain"] == "+25.0% throughput"
    assert rows["with freezing"] == "1,250"
    assert rows["step with freezing"] == "predicted 150.0 ms, measured 160.0 ms (+6.7%)"
    assert rows["batch without freezing"] == (
        "predicted 90.0 ms (72.0 to 112.5 ms), measured 99.0 ms (+10.0%)"
    )
    assert rows["batch with freezing"].startswith("predicted 77.5 ms (62.0 to 96.9 ms), measured")
    assert rows["predictions hold for"] == (
        "4 ranks that share 2 cores; 9 of 10 batches within -20.0% to +25.0% if the machine goes "
        "on as measured"
    )
    assert (
        rows["upper bound, everything frozen"]
        == "60.0 ms a batch, +50.0%; the plan promises +16.0%"
    )
    assert rows["seconds of training"] == "1,234.5"
    assert rows["peak memory"] == "1.50 GiB"
    assert rows["kappa / p_eff: time to a loss, of the run without freezing"] == "1.60"
    assert "the same of batches" not in rows, "a cap that is chosen has no Eq. 50"
    assert rows["tensors never updated since freezing began"] == "25.0%"
    assert rows["device"] == "Abacus 3000, 2 cores"
    assert rows["training.dataset_path"] == "./a\\|b"
    assert rows["freezing.max_freeze_ratio"] == "auto"
    # (10 * 8 + 30 * 4) / (40 * 8), and 2 / 8
    assert "| 0 | 1 | 0.12 | 0.25 | 0.62 |" in page
    assert "| 1 | 0 | 0.50 | 0.75 | 0.25 |" in page


def test_device_seconds_are_those_of_all_devices(tmp_path: Path) -> None:
    rows = rows_of(page_of(tmp_path, **MEASURED))
    assert rows["device-seconds: that times 4 devices"] == "4,938.0"
    assert not any("whole run" in label or "cost" in label for label in rows), "nobody asked"
    emulated = page_of(tmp_path, **MEASURED, emulated_ranks=4)
    assert "device-seconds" not in emulated


def test_a_run_of_several_parts_has_device_seconds_and_cost_of_all(tmp_path: Path) -> None:
    """4 devices for 1,234.5 s after a part of 8 for 1,000 s, at 3.6 an hour."""
    run = run_in(tmp_path)
    outcome, seconds = Outcome(run), 4 * 1234.5 + 8 * 1000.0
    summary = make_summary(**MEASURED, outside_ms=5.0, device_seconds=seconds)
    assert "cost" not in outcome.fields(summary), "no price is known"
    run.config.report.device_hour_price = 3.6
    summary = replace(summary, cost=outcome.fields(summary)["cost"])
    rows = rows_of(render_page(summary, {}, tmp_path))
    assert rows["device-seconds of the whole run, moves and restarts included"] == "12,938.0"
    assert rows["cost of these"] == "12.94"
    assert "\ncost                     12.94 for 12,938.0 device-seconds\n" in render_report(
        summary, tmp_path
    )


def test_kappa_of_batches_stands_beside_eq_50(tmp_path: Path) -> None:
    """1 - 0.8 * (1 - 60 / 90), 77.5 / 90 and 77.5 / 99."""
    settings = {"freezing": {"method": "timelyfreeze", "max_freeze_ratio": 0.8}}
    rows = rows_of(render_page(make_summary(**MEASURED), settings, tmp_path))
    assert rows["the same of batches"] == "by r_max 0.8 alone 0.733, planned 0.861, measured 0.783"


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    page = page_of(tmp_path, failure="status 'Time limit reached'")
    rows = rows_of(page)
    assert "There is no freeze plan: status 'Time limit reached'." in page
    assert rows["gain"] == rows["batch with freezing"] == rows["peak memory"] == "not measured"
    assert rows["tensors never updated since freezing began"] == "freezing has not begun"
    assert "upper bound, everything" not in page
    assert "None" not in page.replace("None yet.", "")
    assert "None yet." in page


def test_a_run_without_freezing_has_no_part_on_it(tmp_path: Path) -> None:
    page = page_of(tmp_path, method="none", schedule=None, tokens_per_second=500.0, step_ms=10.0)
    assert page.startswith("# llama3 8M, no pipeline, no freezing\n")
    assert "## Freezing" not in page
    rows = rows_of(page)
    assert (rows["tokens/s per device"], rows["step"]) == ("500", "10.0 ms")
    assert rows["freezing.method"] == "none"
    assert "freezing.max_freeze_ratio" not in rows


def test_a_policy_has_its_settings_and_no_plan(tmp_path: Path) -> None:
    settings = {"freezing": {"method": "apf", "apf": {"threshold": 0.25}, "lisa": {"x": 1}}}
    summary = make_summary(method="apf", stage_ratios={0: 0.5})
    page = render_page(summary, settings, tmp_path, [])
    assert rows_of(page)["freezing.apf.threshold"] == "0.25"
    assert "lisa" not in page
    assert "| 0 |  | no plan | 0.50 | not measured |" in page


def test_an_emulation_is_told_by_the_virtual_clock(tmp_path: Path) -> None:
    virtual = {
        "emulated_ranks": 4,
        "virtual_tokens_per_second_unfrozen": 10.0,
        "virtual_tokens_per_second": 20.0,
        "virtual_step_ms_unfrozen": 50.0,
        "virtual_step_ms": 25.0,
    }
    page = page_of(tmp_path, **{**MEASURED, **virtual})
    rows = rows_of(page)
    assert "Emulated: 4 ranks ran in one process" in page
    assert rows["gain"] == "+100.0% throughput"
    assert rows["with freezing"] == "20"
    assert rows["step as run on one device"] == "200.0 ms, with freezing 160.0 ms"


@pytest.mark.parametrize(
    ("reached", "text"), [(None, "not reached"), (61.25, "61.2 s of training")]
)
def test_the_reference_run(tmp_path: Path, reached: float | None, text: str) -> None:
    rows = rows_of(
        page_of(
            tmp_path,
            reference_run="outputs/tb/other",
            reference_device="Slide rule",
            reference_loss=2.25,
            reference_seconds=90.0,
            seconds_to_reference_loss=reached,
        )
    )
    assert rows["reference run"] == "`outputs/tb/other`"
    assert rows["its device"] == "Slide rule, another than this run's"
    assert rows["its last training loss"] == "2.2500, after 90.0 s"
    assert rows["time to that loss"] == text


def test_a_run_that_ended_early_says_why(tmp_path: Path) -> None:
    page = page_of(tmp_path, ended_early="stopped by SIGTERM after step 5 of 9; nothing is saved")
    assert "It ended early: stopped by SIGTERM after step 5 of 9; nothing is saved." in page


def test_switched_off_is_said_and_what_is_there_is_listed(tmp_path: Path) -> None:
    (tmp_path / "plots").mkdir()
    for name in ("timeline_measured.png", "timeline_measured.svg", "trace_measured.json"):
        (tmp_path / "plots" / name).write_text("")
    (tmp_path / "steps.csv").write_text("")
    page = page_of(tmp_path, switched_off="from step 4 on: why")
    assert "Freezing was switched off from step 4 on: why." in page
    assert "![timeline measured](plots/timeline_measured.png)" in page
    assert "- [steps.csv](steps.csv): every optimizer step" in page
    assert "plots/trace_measured.json" in page
    assert "plan.json" not in page
    assert "TensorBoard" not in page
