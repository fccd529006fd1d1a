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
from timelyfreeze.records import MOVES, Move, timeline_file, timeline_from_json
from timelyfreeze.schedule.order import one_f_one_b_order
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


def test_each_pipeline_of_a_run_that_moved_has_a_batch(tmp_path: Path) -> None:
    """The second of three was left before anything was measured."""
    write_measured(tmp_path, Phase.WARMUP, Phase.STABLE, order=one_f_one_b_order(4, 4))
    stable = tmp_path / "timelines/measured_stable.json"
    stable.rename(stable.with_stem("measured_stable_1"))
    write_measured(tmp_path, Phase.STABLE, order=one_f_one_b_order(2, 2), first_step=9)
    MOVES.write(tmp_path, [Move(5, 4, 4, 1, "7 1 1 1", 0.5), Move(9, 8, 2, 2, "8 2", 0.5)])
    plot = draw_measured(tmp_path)
    assert titles(plot) == [
        "Without freezing",
        "In the first pipeline",
        "From step 9, 2 pipelines of 2 ranks, layers 8 2",
    ]
    assert isinstance(plot, Figure)
    assert [len(ax.get_yticks()) for ax in plot.axes] == [4, 4, 2]
    # Lanes are equally high.
    heights = [ax.get_subplotspec().get_gridspec().get_height_ratios() for ax in plot.axes]
    assert heights == [[4, 4, 2]] * 3
    files = [timeline_file(tmp_path, Phase.WARMUP), stable.with_stem("measured_stable_1"), stable]
    ends = [timeline_from_json(file.read_text()).batch_ms for file in files]
    for ax, batch_ms in zip(plot.axes, ends, strict=True):
        assert f"batch {batch_ms:.4g} ms" in ax.get_title(loc="left")
        assert ax.get_xlim()[1] == pytest.approx(max(ends), rel=0.01)


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
