"""What the plots of a run folder show, read back from the figures; no pixels are compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from tests.timelyfreeze.plots.folders import lines, write_measured, write_plan, write_settings
from timelyfreeze.plots import gallery
from timelyfreeze.plots.curves import Band, bands, loss_figure, running_medians, speeds
from timelyfreeze.plots.drawing import draw_run
from timelyfreeze.plots.gallery import (
    batches_title,
    draw_measured,
    draw_predicted,
    measured,
    predicted,
)
from timelyfreeze.plots.style import MOST_PNG_BYTES, save
from timelyfreeze.records.tables import (
    COUNTS,
    FRONT,
    MOVES,
    RESPONSES,
    FrontRow,
    FrozenCount,
    LossRow,
    Move,
    ResponseRow,
    StepRow,
)
from timelyfreeze.records.tables import STEPS as STEPS_TABLE
from timelyfreeze.records.timeline import timeline_file, timeline_from_json
from timelyfreeze.schedule.order import one_f_one_b_order
from timelyfreeze.settings.phases import Phase

DRAWN: dict[str, Callable[[Path], Figure | str]] = {
    "curves": gallery.draw_curves,
    "front": gallery.draw_front,
    "loss": gallery.draw_loss,
    "convergence": gallery.draw_convergence,
    "response": gallery.draw_response,
    "histogram": gallery.draw_histogram,
}


def step(number: int, phase: str, ms: float = 100.0, **known: float | None) -> StepRow:
    return StepRow(number, phase, number / 10, ms, 1e5 / ms, **known)


STEPS = [
    step(1, "warmup", 100.0, freeze_ratio=0.0, kappa=1.0, p_eff=1.0),
    step(2, "warmup", 100.0, freeze_ratio=0.0),
    step(3, "lower_bound", 50.0, freeze_ratio=1.0, kappa=0.5, p_eff=0.0),
    step(4, "stable", 80.0, freeze_ratio=0.5, kappa=0.8, p_eff=0.5),
    step(5, "stable", 60.0, freeze_ratio=0.75, kappa=0.6, p_eff=0.8),
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    STEPS_TABLE.write(tmp_path, STEPS)
    (tmp_path / "losses.csv").write_text(
        "step,seconds,train_loss,validation_loss\n"
        + "".join(f"{i},{i / 2},{8 - i / 2},\n" for i in range(1, 13))
        + "12,6,,3.5\n"
    )
    FRONT.write(tmp_path, [FrontRow(1, "warmup", 0, 1), FrontRow(2, "stable", 3, 1)])
    rows = [
        ResponseRow(stage, "B", phase, m, fraction, 10.0 - 6 * fraction + m, 0)
        for stage in (0, 1)
        for phase, fraction in (("upper_bound", 0.0), ("lower_bound", 1.0), ("stable", 0.5))
        for m in (0, 1)
    ]
    RESPONSES.write(tmp_path, rows)
    COUNTS.write(
        tmp_path, [FrozenCount(r, r, f"w{r}{i}", 10, 8, i) for r in (0, 1) for i in (2, 8)]
    )
    settings = {
        "model": {"name": "llama3", "flavor": "8M"},
        "freezing": {"method": "apf"},
        "parallelism": {
            "pipeline_parallel_degree": 4,
            "pipeline_parallel_schedule": "1F1B",
            "pipeline_parallel_schedule_csv": None,
        },
    }
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    return tmp_path


def figure_of(name: str, folder: Path) -> Figure:
    figure = DRAWN[name](folder)
    assert isinstance(figure, Figure), figure
    return figure


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_every_plot_says_what_ran_and_is_small(name: str, run: Path, tmp_path: Path) -> None:
    figure = figure_of(name, run)
    texts = [axes.get_title(loc="left") for axes in figure.axes] + [figure.get_suptitle()]
    (subject,) = [
        text.removesuffix("\napf, 1F1B over 4 ranks, llama3 8M") for text in texts if "apf" in text
    ]
    assert subject[0].isupper()
    assert "\n" not in subject
    named = {text.get_text() for legend in figure.legends for text in legend.get_texts()}
    drawn = {
        line.get_label()
        for axes in figure.axes
        for line in axes.get_lines()
        if line.get_linestyle() != "None" and len(set(line.get_xdata())) > 1
    }
    assert {label for label in drawn if label != "_"} <= named, "the legend names each line"
    png, svg = save(figure, tmp_path / "plots", name)
    assert 0 < png.stat().st_size < MOST_PNG_BYTES
    assert svg.stat().st_size < MOST_PNG_BYTES


@pytest.mark.parametrize("name", DRAWN)
def test_a_run_without_the_data_says_so(name: str, tmp_path: Path) -> None:
    reason = DRAWN[name](tmp_path)
    assert isinstance(reason, str)
    assert ".csv has n" in reason


@pytest.mark.parametrize("name", DRAWN)
def test_a_file_that_cannot_be_read_is_no_missing_one(name: str, tmp_path: Path) -> None:
    for file in ("steps", "front", "losses", "responses", "frozen_counts"):
        (tmp_path / f"{file}.csv").write_text("what,is,this\n1,2,3\n")
    with pytest.raises(ValueError, match=r"\.csv "):
        DRAWN[name](tmp_path)


def test_curves_show_ratio_and_speed_and_break_where_a_phase_ends(run: Path) -> None:
    speed, ratio = figure_of("curves", run).axes
    assert list(lines(ratio).values()) == [
        [[(1.0, 0.0), (2.0, 0.0)], [(3.0, 1.0)], [(4.0, 0.5), (5.0, 0.75)]]
    ]
    medians = lines(speed)["throughput, median of 7 steps (left)"]
    # Of 1250 and 1666.7 tokens/s.
    assert np.allclose(medians[-1], [(4.0, 1458.333), (5.0, 1458.333)], atol=0.01)
    assert len(medians) == 3


def test_speed_counts_what_the_model_reads(run: Path) -> None:
    path = run / "settings.json"
    settings = json.loads(path.read_text())
    assert figure_of("curves", run).axes[0].get_ylabel() == "tokens/s per device"
    path.write_text(json.dumps(settings | {"training": {"dataset": "images"}}))
    assert figure_of("curves", run).axes[0].get_ylabel() == "images/s per device"


def test_speed_of_an_emulation_is_by_the_virtual_clock() -> None:
    rows = [step(1, "", 100.0), step(2, "", 100.0, virtual_step_ms=25.0)]
    assert speeds(rows) == [1000.0, 4000.0]
    assert speeds(rows, n_emulated=4) == [1000.0, 1000.0], "each rank stands for a device"


def test_medians_do_not_reach_into_another_phase() -> None:
    rows = [step(n, "ramp" if n < 4 else "stable") for n in range(1, 10)]
    values = [9.0, 1.0, 2.0, 5.0, 7.0, 6.0, 8.0, 4.0, 3.0]
    assert running_medians(rows, values) == [2.0, 2.0, 2.0, 6.5, 6.0, 5.5, 5.5, 6.0, 5.0]


def test_convergence_leaves_out_what_says_nothing(run: Path) -> None:
    above, below = figure_of("convergence", run).axes
    kappa, p_eff = lines(above).values()
    assert kappa == [[(1.0, 1.0)], [(3.0, 0.5)], [(4.0, 0.8), (5.0, 0.6)]]
    assert p_eff == [[(1.0, 1.0)], [(3.0, 0.0)], [(4.0, 0.5), (5.0, 0.8)]]
    (ratio,) = lines(below)["kappa / p_eff, of arXiv:2602.05754"][:1]
    assert np.allclose(ratio, [(4.0, 1.6), (5.0, 0.75)])


def test_a_run_without_freezing_has_no_phases_and_no_kappa(tmp_path: Path) -> None:
    rows = [step(n, "", freeze_ratio=0.0) for n in (1, 2)]
    STEPS_TABLE.write(tmp_path, rows)
    assert bands(rows) == []
    assert isinstance(DRAWN["curves"](tmp_path), Figure)
    assert "neither kappa nor p_eff" in str(DRAWN["convergence"](tmp_path))


def test_phases_lie_where_they_were() -> None:
    names = [(band.phase.value, band.first, band.last) for band in bands(STEPS)]
    assert names == [("warmup", 1, 2), ("lower_bound", 3, 3), ("stable", 4, 5)]
    assert isinstance(bands(STEPS)[0], Band)


def test_loss_is_drawn_against_steps_and_seconds(run: Path) -> None:
    left, right = figure_of("loss", run).axes
    logged, mean, validated = (line.get_xydata() for line in left.get_lines())
    assert np.allclose(logged, [(i, 8 - i / 2) for i in range(1, 13)])
    # The mean of five losses on a straight line is the one in the middle.
    assert np.allclose(mean, [(i, 8 - (i - 2) / 2) for i in range(5, 13)])
    assert np.allclose(validated, [(12.0, 3.5)])
    assert np.allclose(
        right.get_lines()[0].get_xydata(), [(i / 2, 8 - i / 2) for i in range(1, 13)]
    )


def test_few_losses_are_drawn_as_they_are() -> None:
    rows = [LossRow(1, 0.5, 4.0, None), LossRow(2, 1.0, 3.0, None)]
    left, _ = loss_figure(rows).axes
    (line,) = left.get_lines()
    assert np.allclose(line.get_xydata(), [(1.0, 4.0), (2.0, 3.0)])
    assert line.get_label() == "this run: training"


def test_the_response_is_held_against_the_line_through_what_was_measured(run: Path) -> None:
    first, second = figure_of("response", run).axes
    assert (first.get_title(), second.get_title()) == ("stage 0", "stage 1")
    (points,) = first.collections
    assert sorted(map(tuple, np.asarray(points.get_offsets()).tolist())) == [
        (0.0, 10.0), (0.0, 11.0), (0.5, 7.0), (0.5, 8.0), (1.0, 4.0), (1.0, 5.0),
    ]  # fmt: skip
    early, late = (points.get_facecolor()[i][3] for i in (0, 1))
    assert early < late, "late microbatches are darker"
    assert lines(first)["what a plan assumes"] == [[(0.0, 10.5), (1.0, 4.5)]]


def test_the_histogram_has_a_panel_for_each_rank(run: Path) -> None:
    axes = figure_of("histogram", run).axes
    assert [panel.get_title() for panel in axes] == ["rank 0: 2 tensors", "rank 1: 2 tensors"]
    bars = [(bar.get_x(), bar.get_height()) for bar in axes[0].patches if bar.get_height()]
    # Frozen in 2 and in 8 of 8 backwards: 0.25 and 1.0, in bins of 0.04.
    assert np.allclose(bars, [(0.24, 0.5), (0.96, 0.5)])


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
    assert [*measured(tmp_path), *predicted(tmp_path)] == []


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
    draw_run(tmp_path)
    for name, words in (
        ("measured", ["without freezing", "with everything frozen", "with freezing"]),
        ("predicted", ["without freezing", "with freezing"]),
    ):
        text = (tmp_path / f"plots/trace_{name}.json").read_text()
        names = [
            event["args"]["name"]
            for event in json.loads(text)["traceEvents"]
            if event["name"] == "process_name"
        ]
        assert len(names) == 2 * len(words)
        assert all(words[pid // 2] in name for pid, name in enumerate(names))


def test_the_title_says_what_ran(tmp_path: Path) -> None:
    timeline, _ = write_plan(tmp_path)
    assert batches_title(tmp_path, timeline) == "2 ranks, 4 microbatches"
    write_settings(tmp_path)
    assert batches_title(tmp_path, timeline) == "1F1B, 2 ranks, 4 microbatches, llama3 8M"
    write_settings(tmp_path, csv="orders/eager.csv")
    assert batches_title(tmp_path, timeline).startswith("eager.csv, ")
    (tmp_path / "settings.json").write_text("{}")
    assert batches_title(tmp_path, timeline) == "2 ranks, 4 microbatches", "draw_run tells why"
