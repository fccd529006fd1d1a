"""Reports of summaries made by hand, compared letter by letter with tests/assets/golden."""

from pathlib import Path
from typing import Any

import pytest

from tests.tools.golden import assert_golden, assert_only
from tests.torchtitan.helpers.summaries import make_summary
from torchtitan.freezing.report.reports import render_report, shown_report

FILE = "reports.txt"
FOLDER = Path("outputs/tb/run_1")
UNFROZEN = {"tokens_per_second_unfrozen": 1000.0, "step_ms_unfrozen": 200.0}
SPEED = {**UNFROZEN, "tokens_per_second": 1250.0, "step_ms": 160.0}
PLAN = {
    "batch_ms_unfrozen_predicted": 90.0,
    "batch_ms_predicted": 77.5,
    "outside_ms": 86.5,
    "step_ms_predicted": 164.0,
    "all_frozen_batch_ms": 60.0,
    "planned_gain": 0.1613,
    "upper_bound_gain": 0.5,
    "planned_stage_ratios": {0: 0.125, 1: 0.5},
}
APPLIED = {"stage_ratios": {0: 0.121, 1: 0.5}, "average_freeze_ratio": 0.2345}
BATCHES = {"batch_ms_unfrozen": 99.0, "batch_ms": 77.5}
PLANNED = {**SPEED, **PLAN, **APPLIED}
EMULATED = {
    "emulated_ranks": 4,
    "virtual_tokens_per_second_unfrozen": 1000.0,
    "virtual_step_ms_unfrozen": 200.0,
    "virtual_tokens_per_second": 1250.0,
    "virtual_step_ms": 160.0,
    "real_batch_ms": 590.0,
}
AS_RUN = {
    "tokens_per_second_unfrozen": 1100.0,
    "step_ms_unfrozen": 700.0,
    "tokens_per_second": 1300.0,
    "step_ms": 600.0,
}
CACHE = {"cache_batches": 1200, "cache_entered": 800, "cache_mib": 64.2, "cache_spent_ms": 90.0}
LOSS = {"steps_factor": 1.15, "time_to_loss": 0.92}
OFF = {"switched_off": "from step 301 on: the measured gain is +1.0%"}
SHARED = {"interval_factor": 1.25, "predicts_for": "4 ranks that share 2 cores"}
CHANGED = {**PLANNED, "batch_ms": 93.0, "drift": 1.2}
BESIDE = {"control_steps": 5, "control_batches": 5, "batch_ms_unfrozen": 108.0}
SCENARIOS: dict[str, dict[str, Any]] = {
    "adapters have a line and no phases": {
        "method": "lora",
        "tokens_per_second": 1250.0,
        "step_ms": 160.0,
        "parameters": 8_123_456,
        "parameters_trained": 123_456,
    },
    "adapters first, then freezing": {
        "method": "lora+timelyfreeze",
        **SPEED,
        "adapters_until": 48,
        "step_ms_adapters": 120.0,
        "parameters": 8_123_456,
        "parameters_trained": 123_456,
    },
    "adapters first, then no freezing, resumed behind them": {
        "method": "lora+none",
        "tokens_per_second": 1250.0,
        "adapters_until": 48,
    },
    "a planned run": {**PLANNED, **BATCHES},
    "steps that measure are in the mean, padding is not": {**PLANNED, "counts_padding": False},
    "a policy": {"method": "apf", **SPEED, **APPLIED, **BATCHES, "counts_padding": True},
    "directions": {**SPEED, "gradient_rank": 64},
    "much padding": {**SPEED, "padding": 0.8, "packing": False},
    "a cache": {**SPEED, **CACHE},
    "a cache that saves": {**SPEED, **CACHE, "cache_saved_ms": 5000.0},
    "an interval, and for what it holds": {**PLANNED, **SHARED, **BATCHES},
    "an interval unknown": {**PLANNED, **SHARED, "interval_factor": None, "batch_ms": 77.5},
    "the time to a loss comes first": {**SPEED, **LOSS},
    "the error of a step's time": {**SPEED, **LOSS, "kappa_error": 0.034},
    "the error of the number of steps": {**SPEED, **LOSS, "steps_factor_error": 0.021},
    "utilization": {"peak_tflops": 312.0, "mfu_percent": 20.128, "mfu_percent_unfrozen": 16.05},
    "utilization alone": {"method": "none", "peak_tflops": 154.8, "mfu_percent": 16.05},
    "a slower machine": CHANGED,
    "a slower machine, control steps": {**CHANGED, **BESIDE, "kappa_error": 0.032},
    "a faster machine": {**CHANGED, "drift": 0.5},
    "a machine as fast": {**CHANGED, "drift": 1.05},
    "switched off": {**SPEED, **PLAN, **OFF, "step_ms_off": 201.0},
    "switched off at once": {**UNFROZEN, **OFF, **PLAN},
    "switched off, emulated": {**EMULATED, **PLAN, **OFF, "virtual_step_ms_off": 201.0},
    "ended early": {
        **SPEED,
        **PLAN,
        "ended_early": "no more rows after step 10 of 13; its checkpoint is saved",
    },
    "no freezing": {"method": "none", "tokens_per_second": 500.0, "step_ms": 4.0},
    "emulated": {**EMULATED, **AS_RUN, **PLAN, "batch_ms_unfrozen": 90.0, "batch_ms": 77.5},
    "emulated, no freezing": {
        "method": "none",
        **EMULATED,
        "tokens_per_second": 1300.0,
        "step_ms": 600.0,
    },
    "emulated, too short": {"method": "none", "emulated_ranks": 4},
    "too short": {"method": "none"},
    # What the masks did without a plan, nothing, is left out.
    "no plan": {**UNFROZEN, "failure": "status 'Time limit reached'", **APPLIED},
    # It stopped in the ramp.
    "a plan and no stable step": PLAN,
    "a policy that was not measured": {"method": "apf"},
    "validation": {"method": "none", "tokens_per_second": 500.0, "validation_loss": 2.34567},
}


def report(**metrics: Any) -> str:
    return render_report(make_summary(**metrics), FOLDER)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_report_reads_as_it_should(name: str) -> None:
    assert_golden(FILE, name, report(**SCENARIOS[name]))


def test_every_report_that_is_expected_is_made() -> None:
    assert_only(FILE, SCENARIOS)


def test_the_files_of_a_run_stand_last() -> None:
    *_, files, board = report(**SPEED).splitlines()
    assert files == "files                    outputs/tb/run_1"
    assert board == "TensorBoard              tensorboard --logdir outputs/tb"


def test_nothing_is_said_of_a_part_that_is_not_there() -> None:
    assert report(**PLANNED, gradient_rank=0) == report(**PLANNED)
    assert "padding" not in report(**SPEED, padding=0.8, packing=True)
    assert "padding" not in report(**SPEED, padding=0.1, packing=False)


def test_a_terminal_shows_what_it_brought_whether_it_held_and_where_the_files_are() -> None:
    text = report(**PLANNED, batch_ms=79.0, predicts_for="4 ranks", drift=1.2, validation_loss=2.0)
    assert len(text.splitlines()) == 3 + 16
    labels = [line[:24].rstrip() for line in shown_report(text).splitlines()]
    assert labels == [
        "", "Run report", "----------", "with freezing", "gain", "batch without freezing",
        "batch with freezing", "predictions hold for", "speed has changed", "files", "all of it",
    ]  # fmt: skip
    noted = shown_report(f"{text}note                     larger models gain more\n")
    assert noted == f"{shown_report(text)}note                     larger models gain more\n"
    assert "80% of the tokens are padding" in shown_report(report(**PLANNED, padding=0.8))
    short = report(**SPEED)
    assert shown_report(short) == short
