"""Which timelines of a run folder are shown, and what is said where there are none."""

import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from tests.timelyfreeze.plots.folders import write_measured, write_plan, write_settings
from timelyfreeze.plots.run_timelines import (
    draw_measured,
    draw_predicted,
    run_title,
    trace_measured,
    trace_predicted,
)
from timelyfreeze.schedule.schedules import one_f_one_b_order
from timelyfreeze.settings.phases import Phase


def titles(plot: Figure | str) -> list[str]:
    assert isinstance(plot, Figure)
    return [ax.get_title(loc="left").partition(":")[0] for ax in plot.axes]


@pytest.mark.parametrize(
    ("phases", "shown"),
    [
        (
            (Phase.WARMUP, Phase.UPPER_BOUND, Phase.LOWER_BOUND, Phase.STABLE),
            ["Measured, without freezing", "Measured, with freezing"],
        ),
        (
            (Phase.WARMUP, Phase.MIXED, Phase.STABLE),
            ["Measured, without freezing", "Measured, with freezing"],
        ),
        (
            (Phase.UPPER_BOUND, Phase.OFF),
            ["Measured, without freezing", "Measured, with freezing switched off"],
        ),
        ((Phase.STABLE,), ["Measured, with freezing"]),
        ((Phase.UPPER_BOUND, Phase.LOWER_BOUND), ["Measured, without freezing"]),
        ((Phase.LOWER_BOUND,), ["Measured, with everything frozen"]),
    ],
)
def test_without_freezing_stands_above_with(
    tmp_path: Path, phases: tuple[Phase, ...], shown: list[str]
) -> None:
    write_measured(tmp_path, *phases)
    assert titles(draw_measured(tmp_path)) == shown


def test_the_prediction_follows_from_bounds_and_plan(tmp_path: Path) -> None:
    before, after = write_plan(tmp_path)
    plot = draw_predicted(tmp_path)
    assert titles(plot) == ["Predicted, without freezing", "Predicted, with freezing"]
    assert isinstance(plot, Figure)
    for ax, timeline in zip(plot.axes, (before, after), strict=True):
        assert f"batch {timeline.batch_ms:.4g} ms" in ax.get_title(loc="left")


def test_shared_processors_are_read_from_the_bounds_file(tmp_path: Path) -> None:
    """2 ranks of 4 microbatches have 24 ms of work, and one processor does it all."""
    write_plan(tmp_path, processors=1.0)
    plot = draw_predicted(tmp_path)
    assert isinstance(plot, Figure)
    assert "batch 24 ms" in plot.axes[0].get_title(loc="left")


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    reason = draw_measured(tmp_path)
    assert isinstance(reason, str)
    assert "no measured_*.json" in reason
    write_plan(tmp_path)
    (tmp_path / "plan.json").unlink()
    assert draw_predicted(tmp_path) == (
        "plan.json missing: the run's method makes no plan, or none was made yet"
    )
    assert trace_measured(tmp_path) is trace_predicted(tmp_path) is None


def test_a_plan_of_another_schedule_is_refused(tmp_path: Path) -> None:
    write_plan(tmp_path)
    plan = (tmp_path / "plan.json").read_text()
    write_plan(tmp_path, one_f_one_b_order(2, 3))
    (tmp_path / "plan.json").write_text(plan)
    with pytest.raises(ValueError, match="belong to different pipelines"):
        draw_predicted(tmp_path)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    write_measured(tmp_path, Phase.STABLE)
    (tmp_path / "timelines" / "measured_stable.json").write_text("{")
    with pytest.raises(ValueError, match=r"measured_stable\.json: not the text of a timeline"):
        draw_measured(tmp_path)


def test_traces_hold_every_batch_that_was_measured(tmp_path: Path) -> None:
    write_measured(tmp_path, Phase.UPPER_BOUND, Phase.LOWER_BOUND, Phase.STABLE)
    write_plan(tmp_path)
    for text, words in (
        (
            trace_measured(tmp_path),
            ["without freezing", "with everything frozen", "with freezing"],
        ),
        (trace_predicted(tmp_path), ["without freezing", "with freezing"]),
    ):
        assert text is not None
        names = [
            event["args"]["name"]
            for event in json.loads(text)["traceEvents"]
            if event["name"] == "process_name"
        ]
        assert len(names) == 2 * len(words)
        assert all(words[pid // 2] in name for pid, name in enumerate(names))


def test_the_title_says_what_ran(tmp_path: Path) -> None:
    timeline, _ = write_plan(tmp_path)
    assert run_title(tmp_path, timeline) == "2 ranks, 4 microbatches"
    write_settings(tmp_path)
    assert run_title(tmp_path, timeline) == "1F1B, 2 ranks, 4 microbatches, llama3 8M"
    write_settings(tmp_path, csv="orders/eager.csv")
    assert run_title(tmp_path, timeline).startswith("eager.csv, ")
    (tmp_path / "settings.json").write_text("{}")
    assert run_title(tmp_path, timeline) == "2 ranks, 4 microbatches", "draw_run tells why"
