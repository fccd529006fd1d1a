"""Reports of summaries made by hand, compared letter by letter."""

from pathlib import Path
from typing import Any

import pytest

from tests.torchtitan.helpers.summaries import make_summary
from torchtitan.freezing.report.reports import render_report, shown_report

FOLDER = Path("outputs/tb/run_1")
FILES = [
    "files                    outputs/tb/run_1",
    "TensorBoard              tensorboard --logdir outputs/tb",
]
SPEED = {
    "tokens_per_second_unfrozen": 1000.0,
    "step_ms_unfrozen": 200.0,
    "tokens_per_second": 1250.0,
    "step_ms": 160.0,
}
SPEED_LINES = [
    "without freezing         1,000 tokens/s per device, 200.0 ms a step",
    "with freezing            1,250 tokens/s per device, 160.0 ms a step",
    "gain                     +25.0% throughput",
]
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
APPLIED_LINES = [
    "applied in the last step stage 0: 0.12 1: 0.50",
    "average freeze ratio     0.234 over all steps",
]


def report(**metrics: Any) -> list[str]:
    """The report's lines below its heading, without those of the files."""
    text = render_report(make_summary(**metrics), FOLDER)
    assert text.endswith("\n")
    lines = text.splitlines()
    assert lines[:3] == ["", "Run report", "----------"]
    assert lines[-2:] == FILES
    return lines[3:-2]


def test_adapters_have_a_line_and_no_phases() -> None:
    of_run = {"method": "lora", "tokens_per_second": 1250.0, "step_ms": 160.0}
    assert report(**of_run, parameters=8_123_456, parameters_trained=123_456) == [
        "tokens/s per device      1,250",
        "trained                  123,456 of 8,123,456 parameters, by lora",
    ]


def test_words_beside_numbers_say_what_is_in_them() -> None:
    planned = report(**SPEED, **PLAN, **APPLIED, counts_padding=False)
    included = "average freeze ratio     0.234 over all steps, those that measure included"
    assert "frozen weights learn     in 64 directions each" in report(**SPEED, gradient_rank=64)
    assert report(**SPEED, **PLAN, **APPLIED, gradient_rank=0) == report(**SPEED, **PLAN, **APPLIED)
    padding = "tokens                   without padding (report.count_padding)"
    assert {included, padding} <= set(planned)
    plain = report(method="apf", **SPEED, **APPLIED, counts_padding=True)
    assert APPLIED_LINES[1] in plain
    assert padding not in plain


def test_much_padding_has_a_line_which_a_terminal_shows() -> None:
    line = (
        "padding                  80% of the tokens are padding; data.packing = true would put up "
        "to 5.0 times as many examples into a sequence"
    )
    assert line in report(**SPEED, padding=0.8, packing=False)
    text = render_report(make_summary(**SPEED, **PLAN, **APPLIED, padding=0.8), FOLDER)
    assert line in shown_report(text)
    assert "padding" not in "".join(report(**SPEED, padding=0.8, packing=True))
    assert "padding" not in "".join(report(**SPEED, padding=0.1, packing=False))


def test_a_cache_has_a_line() -> None:
    used = {"cache_batches": 1200, "cache_entered": 800, "cache_mib": 64.2, "cache_spent_ms": 90.0}
    line = (
        "activation cache         800 of 1,200 batches began behind the frozen front; 64 MiB kept; "
        "90 ms spent"
    )
    assert line in report(**SPEED, **used)
    assert f"{line}, about 5,000 ms saved" in report(**SPEED, **used, cache_saved_ms=5000.0)
    assert not any("cache" in told for told in report(**SPEED))


def test_the_report_of_a_planned_run() -> None:
    assert report(**SPEED, **PLAN, **APPLIED, batch_ms_unfrozen=99.0, batch_ms=77.5) == [
        *SPEED_LINES,
        "batch without freezing   predicted 90.0 ms, measured 99.0 ms (+10.0%)",
        "batch with freezing      predicted 77.5 ms, measured 77.5 ms (+0.0%)",
        "step with freezing       predicted 164.0 ms, measured 160.0 ms (-2.4%); "
        "86.5 ms outside of batches",
        "upper bound              60.0 ms a batch with everything frozen (+50.0%); "
        "the plan reaches +16.1%",
        "planned freeze ratio     stage 0: 0.12 1: 0.50",
        APPLIED_LINES[0],
        f"{APPLIED_LINES[1]}, those that measure included",
    ]


def test_a_prediction_has_an_interval_and_says_for_what_it_holds() -> None:
    known = {"interval_factor": 1.25, "predicts_for": "4 ranks that share 2 cores"}
    lines = report(**SPEED, **PLAN, **known, **APPLIED, batch_ms_unfrozen=99.0, batch_ms=77.5)
    assert lines[3:7] == [
        "batch without freezing   predicted 90.0 ms (72.0 to 112.5 ms), measured 99.0 ms (+10.0%)",
        "batch with freezing      predicted 77.5 ms (62.0 to 96.9 ms), measured 77.5 ms (+0.0%)",
        # What is outside of batches scatters in its own way.
        "step with freezing       predicted 164.0 ms, measured 160.0 ms (-2.4%); "
        "86.5 ms outside of batches",
        "predictions hold for     4 ranks that share 2 cores; 9 of 10 batches within -20.0% to "
        "+25.0% if the machine goes on as measured",
    ]
    known["interval_factor"] = None
    unknown = report(**SPEED, **PLAN, **known, **APPLIED, batch_ms=77.5)
    assert "predictions hold for     4 ranks that share 2 cores; interval unknown" in str(unknown)


def test_the_estimated_time_to_a_loss_comes_first() -> None:
    estimate = "0.92 of that without freezing, estimated: a step takes 0.80 of the time, and about "
    assert report(**SPEED, steps_factor=1.15, time_to_loss=0.92)[:2] == [
        f"time to a loss           {estimate}1.15 times as many are needed",
        SPEED_LINES[0],
    ]
    line, *_ = report(**SPEED, steps_factor=1.15, time_to_loss=0.92, kappa_error=0.034)
    assert "a step takes 0.80 +- 0.03 of the time, and about" in line
    line, *_ = report(**SPEED, steps_factor=1.15, time_to_loss=0.92, steps_factor_error=0.021)
    assert line.endswith("1.15 +- 0.02 times as many are needed")


def test_utilization_stands_with_its_peak() -> None:
    summary = make_summary(peak_tflops=312.0, mfu_percent=20.128, mfu_percent_unfrozen=16.05)
    text = render_report(summary, Path("run"))
    assert "MFU                      20.13% of 312 TFLOP/s, without freezing 16.05%\n" in text
    none = make_summary(method="none", peak_tflops=154.8, mfu_percent=16.05)
    assert "16.05% of 154.8 TFLOP/s\n" in render_report(none, Path("run"))


def test_a_machine_of_another_speed_stands_beside_the_prediction() -> None:
    times = {**SPEED, **PLAN, **APPLIED, "batch_ms": 93.0, "drift": 1.2}
    lines = report(**times)
    errors = "(+20.0%; +0.0% at the speed of then)"
    at = lines.index(f"batch with freezing      predicted 77.5 ms, measured 93.0 ms {errors}")
    assert lines[at + 2 : at + 4] == [
        "speed has changed        the machine became 1.2 times slower; the gain compares steps at "
        "both speeds",
        "speed of the machine     forwards took 1.20 times as long as when they were measured",
    ]
    lines = report(
        **times, control_steps=5, control_batches=5, batch_ms_unfrozen=108.0, kappa_error=0.032
    )
    assert (
        "gain                     +25.0% +- 5.0% throughput, by 5 steps without freezing among the "
        "others" in lines
    )
    assert lines[at - 1].endswith("measured 108.0 ms (+20.0%; +0.0% at the speed of then)")
    assert lines[at + 2].endswith("1.2 times slower; the gain is of steps beside each other")
    lines = report(**{**times, "drift": 0.5})
    assert lines[at + 2].startswith("speed has changed        the machine became 2.0 times faster")
    assert not any("speed has changed" in line for line in report(**{**times, "drift": 1.05}))


def test_a_terminal_shows_what_it_brought_whether_it_held_and_where_the_files_are() -> None:
    metrics = {**SPEED, **PLAN, **APPLIED, "batch_ms": 79.0, "predicts_for": "4 ranks"}
    text = render_report(make_summary(**metrics, drift=1.2, validation_loss=2.0), FOLDER)
    assert len(text.splitlines()) == 3 + 16
    labels = [line[:24].rstrip() for line in shown_report(text).splitlines()]
    assert labels == [
        "", "Run report", "----------", "with freezing", "gain", "batch without freezing",
        "batch with freezing", "predictions hold for", "speed has changed", "files", "all of it",
    ]  # fmt: skip
    noted = shown_report(f"{text}note                     larger models gain more\n")
    assert noted == f"{shown_report(text)}note                     larger models gain more\n"
    short = render_report(make_summary(**SPEED), FOLDER)
    assert shown_report(short) == short


OFF = "from step 301 on: the measured gain is +1.0%"
OFF_LINES = [f"freezing switched off    {OFF}", "since then               201.0 ms a step"]


def test_a_run_in_which_freezing_did_not_pay_says_so() -> None:
    lines = report(**SPEED, **PLAN, switched_off=OFF, step_ms_off=201.0)
    assert lines[:5] == [*SPEED_LINES, *OFF_LINES]
    at_once = report(
        tokens_per_second_unfrozen=1000.0, step_ms_unfrozen=200.0, switched_off=OFF, **PLAN
    )
    assert at_once[:3] == [
        SPEED_LINES[0],
        OFF_LINES[0],
        "batch without freezing   predicted 90.0 ms, not measured",
    ]
    emulated = report(**EMULATED, **PLAN, switched_off=OFF, virtual_step_ms_off=201.0)
    assert emulated[4:6] == OFF_LINES


def test_a_run_that_ended_early_says_so_first() -> None:
    why = "no more rows after step 10 of 13; its checkpoint is saved"
    lines = report(**SPEED, **PLAN, ended_early=why)
    assert lines[0] == f"ended early              {why}"
    assert lines[1:] == report(**SPEED, **PLAN)


def test_a_method_that_makes_no_plan_is_not_asked_for_one() -> None:
    metrics = {**SPEED, **APPLIED, "batch_ms_unfrozen": 99.0, "batch_ms": 77.5}
    assert report(method="apf", **metrics) == [
        *SPEED_LINES,
        "batch without freezing   measured 99.0 ms",
        "batch with freezing      measured 77.5 ms",
        *APPLIED_LINES,
    ]


def test_a_run_without_freezing_reports_its_speed_alone() -> None:
    lines = report(method="none", tokens_per_second=500.0, step_ms=4.0)
    assert lines == ["tokens/s per device      500"]


EMULATED = {
    "emulated_ranks": 4,
    "virtual_tokens_per_second_unfrozen": 1000.0,
    "virtual_step_ms_unfrozen": 200.0,
    "virtual_tokens_per_second": 1250.0,
    "virtual_step_ms": 160.0,
    "real_batch_ms": 590.0,
}
EMULATED_LINE = (
    "emulated                 4 ranks in one process; times are those of a device for each rank, "
    "without communication"
)
AS_RUN_LINE = (
    "as run on one device     1,300 tokens/s, 600.0 ms a step; the work of a batch took 590.0 ms"
)


def test_an_emulated_run_reports_the_pipelines_times_and_its_own_beside_them() -> None:
    own = {
        "tokens_per_second_unfrozen": 1100.0,
        "step_ms_unfrozen": 700.0,
        "tokens_per_second": 1300.0,
        "step_ms": 600.0,
    }
    lines = report(**EMULATED, **own, **PLAN, batch_ms_unfrozen=90.0, batch_ms=77.5)
    assert lines[:4] == [EMULATED_LINE, *SPEED_LINES]
    assert "batch with freezing      predicted 77.5 ms, measured 77.5 ms (+0.0%)" in lines
    assert lines[-1] == AS_RUN_LINE


def test_an_emulated_run_without_freezing_reports_both_speeds() -> None:
    lines = report(method="none", **EMULATED, tokens_per_second=1300.0, step_ms=600.0)
    assert lines == [EMULATED_LINE, "tokens/s per device      1,250", AS_RUN_LINE]


def test_an_emulated_run_too_short_to_measure_says_so() -> None:
    lines = report(method="none", emulated_ranks=4)
    assert lines == [EMULATED_LINE, "too few steps to measure"]


def test_a_run_too_short_to_measure_says_so() -> None:
    assert report(method="none") == ["too few steps to measure"]


@pytest.mark.parametrize("why", ["not enough steps to measure", "status 'Time limit reached'"])
def test_a_run_without_the_plan_it_should_have_says_why(why: str) -> None:
    """What the masks did without a plan, nothing, is left out."""
    lines = report(
        tokens_per_second_unfrozen=1000.0, step_ms_unfrozen=200.0, failure=why, **APPLIED
    )
    assert lines == [SPEED_LINES[0], f"no freeze plan           {why}"]


def test_what_was_never_measured_is_not_made_up() -> None:
    """A run that stopped in the ramp has a plan, but no stable step."""
    assert report(**PLAN) == [
        "batch without freezing   predicted 90.0 ms, not measured",
        "batch with freezing      predicted 77.5 ms, not measured",
        "step with freezing       predicted 164.0 ms, not measured; 86.5 ms outside of batches",
        "upper bound              60.0 ms a batch with everything frozen (+50.0%); "
        "the plan reaches +16.1%",
        "planned freeze ratio     stage 0: 0.12 1: 0.50",
    ]
    assert report(method="apf") == [
        "batch without freezing   not measured",
        "batch with freezing      not measured",
    ]


def test_a_validation_is_reported_where_there_was_one() -> None:
    lines = report(method="none", tokens_per_second=500.0, validation_loss=2.34567)
    assert lines == ["tokens/s per device      500", "validation loss          2.3457"]
