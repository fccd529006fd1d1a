"""What is drawn of many runs: the data by hand, and names where they can be read."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes

from tests.timelyfreeze.compare.run_folders import write_run, write_scores
from timelyfreeze.compare.curves import curves, front, points, stage_ratios, training_losses
from timelyfreeze.compare.drawing import color, line_style
from timelyfreeze.compare.groups import Group, Spread, compare, group
from timelyfreeze.compare.metrics import Criteria
from timelyfreeze.compare.plots import KINDS, MODELS, TOP1, Plot, plots
from timelyfreeze.compare.runs.run import find_runs, flatten, read_run
from timelyfreeze.compare.runs.variants import FEWER_STEPS, peer_name, variants, work_differs
from timelyfreeze.records.tables import STEPS


def groups_of(folder: Path, window: int = 2) -> list[Group]:
    return group(compare(find_runs([folder]).runs, Criteria(window)))


def drawn(folder: Path, window: int = 2, reference: Path | None = None) -> dict[str, Plot]:
    criteria = Criteria(window, None if reference is None else read_run(reference))
    return {p.name: p for p in plots(groups_of(folder, window), criteria)}


def axes_of(plot: Plot) -> list[Axes]:
    assert plot.figure is not None
    return plot.figure.axes


def texts(axes: Axes) -> set[str]:
    return {text.get_text() for text in axes.texts}


def names(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    assert legend is not None
    return [text.get_text() for text in legend.get_texts()]


def write_steps(folder: Path, ratios: Sequence[float | str]) -> None:
    rows = [f"{step},stable,1,1,1,,{ratio},,,,," for step, ratio in enumerate(ratios, 1)]
    (folder / "steps.csv").write_text("\n".join([",".join(STEPS.header), *rows]) + "\n")


# --- settings that set runs apart -----------------------------------------------------------------


def test_settings_are_flat() -> None:
    assert flatten({"a": {"b": 1, "c": {"d": None}}, "e": []}) == {"a.b": 1, "a.c.d": None, "e": []}


def test_work_is_what_a_step_does() -> None:
    one = {"training.seq_len": 64, "training.steps": 10, "optimizer.lr": 0.1, "freezing.seed": 1}
    assert not work_differs(one, {**one, "training.steps": 20, "optimizer.lr": 0.2})
    assert work_differs(one, {**one, "training.seq_len": 32})
    counting = {**one, "report.count_padding": True}
    assert work_differs(counting, {**counting, "report.count_padding": False})
    # Nothing is known against a run that left no settings.
    assert not work_differs(one, {})


def test_variants_leave_out_what_does_not_matter_to_a_method() -> None:
    one = {
        "freezing.max_freeze_ratio": 0.5, "freezing.seed": 1, "freezing.apf.threshold": 0.3,
        "parallelism.pipeline_parallel_schedule": "GPipe", "job.dump_folder": "a",
        "training.seq_len": 64, "optimizer.lr": 0.1,
    }  # fmt: skip
    other = {
        "freezing.max_freeze_ratio": 0.8, "freezing.seed": 2, "freezing.apf.threshold": 0.4,
        "parallelism.pipeline_parallel_schedule": "1F1B", "job.dump_folder": "b",
        "training.seq_len": 64, "optimizer.lr": 0.2,
    }  # fmt: skip
    cap, threshold, rate = "max_freeze_ratio 0.5", "apf.threshold 0.3", "optimizer.lr 0.1"
    both = [(one, {}), (other, {})]
    assert variants("timelyfreeze", both)[0] == f"{cap}, {rate}"
    assert variants("timelyfreeze+apf", both)[0] == f"{cap}, {threshold}, {rate}"
    assert variants("none", [*both, ({}, {})]) == [rate, "optimizer.lr 0.2", ""]
    assert variants("none", [(one, {}), (one, {})]) == ["", ""]


def test_settings_of_another_place_set_no_runs_apart(tmp_path: Path) -> None:
    for device in ("some CPU", "some GPU"):
        settings = {"training": {"seq_len": len(device)}}
        write_run(tmp_path / device, "apf", device=device, settings=settings)
    write_run(tmp_path / "c", "apf", device="some GPU", settings={"training": {"seq_len": 1}})
    told = [(one.place.split(",")[0], one.variant) for one in groups_of(tmp_path)]
    assert told == [
        ("2 x some CPU", ""), ("2 x some GPU", "seq_len 1"), ("2 x some GPU", "seq_len 8"),
    ]  # fmt: skip


# --- trade-offs -----------------------------------------------------------------------------------


def write_points(folder: Path, values: dict[str, tuple[float, float]], **more: Any) -> None:
    for method, (speed, loss) in values.items():
        write_run(folder / method, method, tokens_per_second=speed, validation_loss=loss, **more)


def test_the_front_is_what_nothing_beats(tmp_path: Path) -> None:
    write_points(
        tmp_path,
        {
            "none": (100, 2.0), "apf": (120, 2.2), "lisa": (130, 2.1), "fixed": (150, 2.5),
            "linear": (150, 2.4), "slow": (90, 2.0),
        },
    )  # fmt: skip
    found = points(groups_of(tmp_path), "validation_loss")
    assert [p.group.method for p in front(found, low_is_good=True)] == ["linear", "lisa", "none"]
    assert [p.group.method for p in front(found, low_is_good=False)] == ["fixed"]


def test_bars_are_the_spread_and_no_smaller_than_the_standard_error(tmp_path: Path) -> None:
    for seed, accuracy in [(1, 0.5), (2, 0.52)]:
        run = write_run(tmp_path / f"{seed}", "apf", seed=seed, tokens_per_second=100.0 * seed)
        write_scores(run, accuracy, n_questions=100)
    (point,) = points(groups_of(tmp_path), "accuracy", "accuracy_stderr")
    assert point.x == Spread(150.0, 100.0, 200.0)
    # Of four benchmarks with 100 questions each: sqrt(p (1 - p) / 100) / 2.
    errors = [100 * math.sqrt(p * (1 - p) / 100) / 2 for p in (0.5, 0.52)]
    assert point.y.mean == pytest.approx(51.0)
    assert point.y.low == pytest.approx(51.0 - sum(errors) / 2)
    (plain,) = points(groups_of(tmp_path), "accuracy")
    assert (plain.y.low, plain.y.high) == pytest.approx((50.0, 52.0))


def test_a_trade_off_has_a_panel_for_each_schedule_and_names_its_points(tmp_path: Path) -> None:
    for schedule in ("1F1B", "GPipe"):
        write_points(tmp_path / schedule, {"none": (100, 2.0), "a$b$": (120, 2.2)},
                     schedule=schedule)  # fmt: skip
    write_run(tmp_path / "c", "lisa", tokens_per_second=110.0)
    plot = drawn(tmp_path)["loss_throughput"]
    panels = axes_of(plot)
    assert [axes.get_title(loc="left") for axes in panels] == ["GPipe", "1F1B"]
    assert panels[0].get_xlim() == panels[1].get_xlim()
    # Better is up, and loss is better if low.
    assert panels[0].get_ylim()[0] > panels[0].get_ylim()[1]
    assert sorted(names(panels[0])) == ["a$b$", "none"]
    assert not any(text.get_parse_math() for text in panels[0].get_legend().get_texts())
    assert plot.missing == ("without a validation loss that is a number: 1F1B lisa",)
    assert "GPipe none: 100 tokens/s, 2.000" in plot.alt


def test_accuracies_on_other_questions_share_no_plot(tmp_path: Path) -> None:
    write_scores(write_run(tmp_path / "a", "none", tokens_per_second=1.0), 0.5)
    write_scores(write_run(tmp_path / "b", "apf", tokens_per_second=2.0), 0.6, n_questions=20)
    plot = drawn(tmp_path)["accuracy_throughput"]
    assert plot.figure is None
    assert plot.missing == ("the runs were asked different questions",)


# --- several models -------------------------------------------------------------------------------


def write_scored(folder: Path, model: str, schedule: str, speed: float, accuracy: float) -> None:
    write_scores(
        write_run(folder / f"{model} {schedule}", "apf", model=model, schedule=schedule,
                  tokens_per_second=speed),
        accuracy,
    )  # fmt: skip


def test_each_model_has_a_row_with_axes_of_its_own(tmp_path: Path) -> None:
    for schedule, more in (("GPipe", 0.0), ("1F1B", 10.0)):
        write_scored(tmp_path, "llama3 1B", schedule, 1000.0 + more, 0.4)
    write_scored(tmp_path, "llama3 8B", "GPipe", 100.0, 0.6)
    plot = drawn(tmp_path)["accuracy_models"]
    panels = axes_of(plot)
    assert [axes.get_title(loc="left") for axes in panels] == [
        "llama3 1B\nGPipe", "llama3 1B\n1F1B", "llama3 8B\nGPipe",
    ]  # fmt: skip
    first, second, other = panels
    assert (first.get_xlim(), first.get_ylim()) == (second.get_xlim(), second.get_ylim())
    assert first.get_xlim()[0] < 1000.0 < first.get_xlim()[1]
    assert other.get_xlim()[0] < 100.0 < other.get_xlim()[1] < 1000.0
    places = [axes.get_position() for axes in panels]
    assert places[0].y0 == places[1].y0 > places[2].y1
    assert places[0].x0 == places[2].x0
    assert names(other) == ["apf"]
    assert "GPipe apf: 100 tokens/s, 60.000 (llama3 8B)" in plot.alt
    assert plot.place == "2 x some CPU, 2 cores"


def test_models_of_one_schedule_stand_side_by_side(tmp_path: Path) -> None:
    for model in ("llama3 1B", "llama3 8B"):
        write_scored(tmp_path, model, "1F1B", 100.0, 0.4)
    left, right = axes_of(drawn(tmp_path)["accuracy_models"])
    assert left.get_position().y0 == right.get_position().y0


def test_one_model_is_no_comparison_of_models(tmp_path: Path) -> None:
    write_scored(tmp_path, "llama3 1B", "1F1B", 100.0, 0.4)
    assert "accuracy_models" not in drawn(tmp_path)
    write_run(tmp_path / "unscored", "apf", model="llama3 8B")
    plot = drawn(tmp_path)["accuracy_models"]
    assert plot.figure is None
    assert plot.missing == ("fewer than two models have an average accuracy",)


# --- curves and stages ----------------------------------------------------------------------------


def test_repeats_make_one_curve_with_its_spread(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "apf", seed=1, losses=[(10, 4.0), (20, 2.0), (30, 1.0)])
    write_run(tmp_path / "b", "apf", seed=2, losses=[(20, 4.0), (40, 4.0), (60, 2.0)])
    (one,) = groups_of(tmp_path)
    (curve,) = curves([one], training_losses(2))
    assert (curve.xs, curve.ys) == ((30.0, 45.0), (3.5, 2.25))
    assert (curve.lows, curve.highs) == ((3.0, 1.5), (4.0, 3.0))


def test_repeats_that_do_not_fit_together_stay_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "apf", seed=1, losses=[(10, 4.0), (20, 2.0)])
    write_run(tmp_path / "b", "apf", seed=2, losses=[(20, 4.0)])
    write_run(tmp_path / "c", "apf", seed=3)
    (one,) = groups_of(tmp_path)
    assert [curve.xs for curve in curves([one], training_losses(1))] == [(10.0, 20.0), (20.0,)]


def test_freeze_ratios_are_those_of_the_steps_that_know_theirs(tmp_path: Path) -> None:
    write_steps(write_run(tmp_path / "a", "apf", stage_ratios={"1": 0.5, "0": 0.25}), ["", 0.5, 1])
    write_run(tmp_path / "b", "apf", seed=2, stage_ratios={"0": 0.75, "1": 0.5})
    (one,) = groups_of(tmp_path)
    (curve,) = curves([one], lambda run: run.freeze_ratios)
    assert (curve.xs, curve.ys) == ((2.0, 3.0), (0.5, 1.0))
    assert [found.ratios for found in stage_ratios([one])] == [{0: 0.5, 1: 0.5}]
    plot = drawn(tmp_path)["freeze_ratio_stages"]
    assert "1F1B apf: stage 0 0.50, stage 1 0.50" in plot.alt
    assert texts(axes_of(plot)[0]) == {"0.50"}


def test_lines_have_their_names_and_the_reference_its_height(tmp_path: Path) -> None:
    reference = write_run(tmp_path / "a", "none", losses=[(1, 3.0), (2, 2.0)])
    write_run(tmp_path / "b", "timelyfreeze+apf", losses=[(1, 3.0), (2, 2.5)])
    (axes,) = axes_of(drawn(tmp_path, 1, reference)["loss_seconds"])
    assert names(axes) == ["none", "timelyfreeze+apf"]
    assert texts(axes) == {"where 1F1B none seed 42 ends"}
    heights = [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == ":"]
    assert heights == [2.0]
    write_run(tmp_path / "c", "none", model="llama3 1B", losses=[(1, 3.0), (2, 2.0)])
    other = axes_of(drawn(tmp_path, 1, reference)["loss_seconds_2"])[0]
    assert (names(other), texts(other)) == (["none"], set())


def test_held_out_losses_are_lines_and_those_of_peers_their_ends(tmp_path: Path) -> None:
    losses = [(1.0, 3.0), (2.0, 2.0)]
    reference = write_run(tmp_path / "a", "none", losses=losses, validation_loss=0.25)
    write_run(tmp_path / "b", peer_name(FEWER_STEPS, "apf"), losses=losses)
    (axes,) = axes_of(drawn(tmp_path, 1, reference)["held_out_loss_seconds"])
    none, peer, target = axes.lines
    assert list(zip(*none.get_data(), strict=True)) == [(1.0, 0.5), (2.0, 0.5)]
    assert list(zip(*peer.get_data(), strict=True)) == [(2.0, 0.5)]
    assert target.get_ydata()[0] == 0.25
    assert axes.get_ylabel() == "held-out loss"


def test_top1_over_seconds_has_the_mean_of_repeats_and_is_for_pictures_alone(
    tmp_path: Path,
) -> None:
    of_pictures = {"unit": "images", "model": "vit tiny", "tokens_per_second": 8.0}
    for seed, last in ((1, 0.5), (2, 0.75)):
        before_and_after = [(0.2, 0.0), (2.0, 0.25), (4.0, last)]
        write_run(tmp_path / f"a{seed}", "none", seed=seed, top1=before_and_after,
                  validation_loss=1.0, **of_pictures)  # fmt: skip
    write_run(tmp_path / "b", "apf", **of_pictures)
    shown = drawn(tmp_path)
    plot = shown["top1_seconds"]
    (axes,) = axes_of(plot)
    (line,) = axes.lines
    assert list(zip(*line.get_data(), strict=True)) == [(0.2, 0.0), (2.0, 25.0), (4.0, 62.5)]
    assert 0.0 < axes.get_ylim()[0] < 25.0, "not of the validation before training"
    assert axes.get_ylim()[1] > 75.0
    assert plot.alt.endswith("1F1B none ends at 62.50% after 4 s.")
    assert plot.missing == ("without validations on pictures (accuracies.csv): 1F1B apf",)
    assert axes_of(shown["loss_throughput"])[0].get_xlabel() == "images/s per device"
    write_run(tmp_path / "text" / "a", "none", model="llama3 1B")
    assert "top1_seconds" not in drawn(tmp_path / "text")


def test_peers_are_where_they_end(tmp_path: Path) -> None:
    """Of two repeats with validations at other steps, the mean of both ends."""
    of_pictures = {"unit": "images", "model": "vit tiny", "validation_loss": 1.0}
    method = peer_name(FEWER_STEPS, "apf")
    for seed, ends in ((1, [(1.0, 0.25), (3.0, 0.5)]), (2, [(5.0, 0.75)])):
        write_run(tmp_path / f"a{seed}", method, seed=seed, top1=ends, **of_pictures)
    ((line,),) = ([*axes.lines] for axes in axes_of(drawn(tmp_path)["top1_seconds"]))
    assert list(zip(*line.get_data(), strict=True)) == [(4.0, 62.5)]


def test_a_run_that_diverged_spoils_no_plot(tmp_path: Path) -> None:
    losses = [(1.0, 3.0), (2.0, 2.0), (3.0, math.nan), (4.0, math.inf)]
    write_run(tmp_path / "a", "apf", tokens_per_second=1.0, validation_loss=math.nan, losses=losses)
    write_run(tmp_path / "b", "none", tokens_per_second=1.0, validation_loss=2.0, losses=losses[:2])
    shown = drawn(tmp_path, 1)
    assert names(axes_of(shown["loss_throughput"])[0]) == ["none"]
    assert shown["loss_throughput"].missing == (
        "without a validation loss that is a number: 1F1B apf",
    )
    (axes,) = axes_of(shown["loss_seconds"])
    assert sorted(names(axes)) == ["apf", "none"]
    assert [tuple(line.get_ydata()) for line in axes.lines][:2] == [(3.0, 2.0), (3.0, 2.0)]


def test_what_is_missing_is_said_and_places_share_no_plot(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "apf", tokens_per_second=1.0)
    write_run(tmp_path / "b", "apf", tokens_per_second=1.0, device="some GPU", steps_done=3)
    write_run(tmp_path / "c", "apf", tokens_per_second=1.0, device="some GPU")
    shown = drawn(tmp_path)
    kinds = [kind for kind in KINDS if kind not in (MODELS, TOP1)]
    assert list(shown) == [*kinds, *(f"{kind}_2" for kind in kinds)]
    assert {p.figure for p in shown.values()} == {None}
    assert [p.missing for p in shown.values()][:8] == [
        ("no run has an average accuracy",),
        ("no run has a validation loss that is a number",),
        ("no run has 2 logged losses",),
        ("no run has validation losses",),
        ("no run has freeze ratios by step (steps.csv)",),
        ("no run has freeze ratios by stage",),
        ("no run has counts of frozen tensors (frozen_counts.csv)",),
        ("no run has a batch, measured or planned",),
    ]
    assert shown["loss_seconds_2"].place == "2 x some GPU, llama3 8M"


def test_methods_look_the_same_everywhere_and_different_from_each_other() -> None:
    methods = ["none", "timelyfreeze", "apf", "autofreeze", "pipetransformer", "smartpipe",
               "egeria", "fixed", "linear", "lisa", "timelyfreeze+apf"]  # fmt: skip
    assert len({(color(method), line_style(method)) for method in methods}) == len(methods)
    assert color("of_my_own") == color("of_my_own")
