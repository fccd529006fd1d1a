"""The page on a run, from metrics and files made by hand, as it is in tests/assets/golden."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tools.golden import assert_golden, assert_only
from tests.torchtitan.helpers.job_configs import put
from tests.torchtitan.helpers.report_runs import run_in
from tests.torchtitan.helpers.summaries import make_summary
from timelyfreeze.records.tables import FrozenCount
from torchtitan.freezing.report.reports import render_page, render_report
from torchtitan.freezing.report.times import Outcome
from torchtitan.settings.job_config import JobConfig

FILE = "pages.txt"
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


def page_of(folder: Path, counts: list[FrozenCount] | None = None, **metrics: Any) -> str:
    config = JobConfig()
    put(config, "freezing", method=metrics.get("method", "timelyfreeze"))
    config.training.dataset_path = "./a|b"
    return render_page(make_summary(**metrics), config.to_dict(), folder, counts or [])


VIRTUAL: dict[str, Any] = {
    "emulated_ranks": 4,
    "virtual_tokens_per_second_unfrozen": 10.0,
    "virtual_tokens_per_second": 20.0,
    "virtual_step_ms_unfrozen": 50.0,
    "virtual_step_ms": 25.0,
}
REFERENCE: dict[str, Any] = {
    "reference_run": "outputs/tb/other",
    "reference_device": "Slide rule",
    "reference_loss": 2.25,
    "reference_seconds": 90.0,
}
# For how long each tensor was frozen: (10 * 8 + 30 * 4) / (40 * 8), and 2 / 8.
SCENARIOS: dict[str, dict[str, Any]] = {
    "a run with freezing": {"counts": COUNTS, **MEASURED, "gradient_rank": 64},
    "not measured": {"failure": "status 'Time limit reached'"},
    "no freezing": {
        "method": "none",
        "schedule": None,
        "tokens_per_second": 500.0,
        "step_ms": 10.0,
    },
    "a policy": {"method": "apf", "stage_ratios": {0: 0.5}},
    "emulated": {**MEASURED, **VIRTUAL},
    "a reference that is not reached": REFERENCE,
    "a reference that is reached": {**REFERENCE, "seconds_to_reference_loss": 61.25},
    "ended early": {"ended_early": "stopped by SIGTERM after step 5 of 9; nothing is saved"},
    "switched off": {"switched_off": "from step 4 on: why"},
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_page_reads_as_it_should(tmp_path: Path, name: str) -> None:
    if name == "switched off":  # and with files
        (tmp_path / "plots").mkdir()
        for file in ("timeline_measured.png", "timeline_measured.svg", "trace_measured.json"):
            (tmp_path / "plots" / file).write_text("")
        (tmp_path / "steps.csv").write_text("")
    page = page_of(tmp_path, **SCENARIOS[name])
    assert_golden(FILE, name, page.replace(str(tmp_path), "FOLDER").rstrip("\n") + "\n")


def test_every_page_that_is_expected_is_made() -> None:
    assert_only(FILE, SCENARIOS)


def test_a_run_of_several_parts_has_device_seconds_and_cost_of_all(tmp_path: Path) -> None:
    """4 devices for 1,234.5 s after a part of 8 for 1,000 s, at 3.6 an hour."""
    run = run_in(tmp_path)
    outcome, seconds = Outcome(run), 4 * 1234.5 + 8 * 1000.0
    summary = make_summary(**MEASURED, outside_ms=5.0, device_seconds=seconds)
    assert "cost" not in outcome.fields(summary), "no price is known"
    run.config.report.device_hour_price = 3.6
    summary = replace(summary, cost=outcome.fields(summary)["cost"])
    page = render_page(summary, {}, tmp_path)
    assert "| device-seconds of the whole run, moves and restarts included | 12,938.0 |" in page
    assert "| cost of these | 12.94 |" in page
    assert "\ncost                     12.94 for 12,938.0 device-seconds\n" in render_report(
        summary, tmp_path
    )


def test_kappa_of_batches_stands_beside_eq_50(tmp_path: Path) -> None:
    """1 - 0.8 * (1 - 60 / 90), 77.5 / 90 and 77.5 / 99."""
    settings = {"freezing": {"method": "timelyfreeze", "max_freeze_ratio": 0.8}}
    page = render_page(make_summary(**MEASURED), settings, tmp_path)
    row = "| the same of batches | by r_max 0.8 alone 0.733, planned 0.861, measured 0.783 |"
    assert row in page


def test_a_policy_has_its_own_settings_alone(tmp_path: Path) -> None:
    settings = {"freezing": {"method": "apf", "apf": {"threshold": 0.25}, "lisa": {"x": 1}}}
    page = render_page(make_summary(method="apf"), settings, tmp_path, [])
    assert "| freezing.apf.threshold | 0.25 |" in page
    assert "lisa" not in page
