"""What is drawn of single runs: batches and counts by hand, read back from the figures."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

from tests.timelyfreeze.compare.run_folders import write_run
from tests.timelyfreeze.plots.folders import write_measured, write_plan
from timelyfreeze.compare.groups import compare, group
from timelyfreeze.compare.metrics import Criteria
from timelyfreeze.compare.plots import Plot, plots
from timelyfreeze.compare.runs.run import find_runs
from timelyfreeze.records.tables import COUNTS, FrozenCount
from timelyfreeze.settings.phases import Phase

# Of 1F1B with 2 ranks and 4 microbatches: F takes 1 ms and B 2, with half of it frozen 1.5. A batch
# is 5 times F and B, of which each rank works 4.
UNFROZEN, FROZEN = "batch 15 ms", "batch 12.5 ms"
GAIN, BUBBLES = " (+20.0% throughput)", ", bubbles 20.0%"


def drawn(folder: Path) -> dict[str, Plot]:
    groups = group(compare(find_runs([folder]).runs, Criteria(2)))
    return {plot.name: plot for plot in plots(groups, Criteria(2))}


def axes_of(plot: Plot) -> list[Axes]:
    assert plot.figure is not None
    return plot.figure.axes


def titles(plot: Plot) -> list[str]:
    return [axes.get_title(loc="left") for axes in axes_of(plot)]


def write_batches(folder: Path, method: str, *phases: Phase, **more: Any) -> Path:
    run = write_run(folder, method, **more)
    write_measured(run, *phases)
    return run


def write_counts(run: Path, *times_frozen: int) -> None:
    """Write two ranks with a tensor for each number, of 8 backwards; the first rank froze all."""
    COUNTS.write(
        run,
        [
            FrozenCount(rank, rank, f"w{i}", 10 * (i + 1), 8, 8 if rank == 0 else times)
            for rank in (0, 1)
            for i, times in enumerate(times_frozen)
        ],
    )


# --- timelines ------------------------------------------------------------------------------------


def test_batches_of_all_methods_share_a_time_axis_and_are_held_against_none(
    tmp_path: Path,
) -> None:
    write_run(tmp_path / "n", "none")
    write_batches(tmp_path / "t", "timelyfreeze", Phase.UPPER_BOUND, Phase.STABLE, Phase.OFF)
    write_batches(tmp_path / "a", "apf", Phase.WARMUP, Phase.OFF)
    write_run(tmp_path / "p", "fewer_steps_for_apf")
    plot = drawn(tmp_path)["timelines"]
    assert titles(plot) == [
        f"none, measured without freezing by apf, seed 42: {UNFROZEN}{BUBBLES}",
        f"apf, seed 42, measured with freezing switched off: {UNFROZEN} (+0.0% throughput)"
        f"{BUBBLES}",
        f"timelyfreeze, seed 42, measured with freezing: {FROZEN}{GAIN}{BUBBLES}",
    ]
    panels = axes_of(plot)
    assert len({panel.get_xlim() for panel in panels}) == 1
    ends = [[line.get_xdata()[0] for line in panel.lines] for panel in panels]
    assert ends == [[], [15.0], [15.0]]
    assert plot.missing == ()
    assert plot.alt == (
        "Timelines of one batch. 1F1B none: measured without freezing, 15 ms; "
        "1F1B apf: measured with freezing switched off, 15 ms; "
        "1F1B timelyfreeze: measured with freezing, 12.5 ms."
    )


def test_the_first_seed_is_shown_and_none_by_a_run_of_its_seed(tmp_path: Path) -> None:
    for seed in (2, 3):
        write_run(tmp_path / f"n{seed}", "none", seed=seed)
    for method, seed in (("apf", 1), ("apf", 2), ("lisa", 2)):
        folder = tmp_path / f"{method}{seed}"
        write_batches(folder, method, Phase.WARMUP, Phase.STABLE, seed=seed)
    names = [title.partition(":")[0] for title in titles(drawn(tmp_path)["timelines"])]
    assert names == [
        "none, measured without freezing by apf, seed 2",
        "apf, seed 1, measured with freezing",
        "lisa, seed 2, measured with freezing",
    ]


def test_none_is_shown_by_the_run_whose_unfrozen_batches_are_nearest_to_its_own(
    tmp_path: Path,
) -> None:
    write_run(tmp_path / "n", "none", batch_ms=100.0)
    for method, ms in (("apf", 90.0), ("lisa", 101.0), ("linear", 103.0)):
        write_batches(tmp_path / method, method, Phase.WARMUP, Phase.STABLE, batch_ms_unfrozen=ms)
    first = titles(drawn(tmp_path)["timelines"])[0]
    assert first.startswith("none, measured without freezing by lisa, seed 42")


def test_a_plan_stands_in_for_what_was_not_measured(tmp_path: Path) -> None:
    write_run(tmp_path / "n", "none")
    write_plan(write_run(tmp_path / "t", "timelyfreeze"))
    write_batches(tmp_path / "z", "timelyfreeze+apf", Phase.STABLE)
    assert titles(drawn(tmp_path)["timelines"]) == [
        f"none, predicted without freezing by timelyfreeze, seed 42: {UNFROZEN}{BUBBLES}",
        f"timelyfreeze, seed 42, predicted with freezing: {FROZEN}{GAIN}{BUBBLES}",
        f"timelyfreeze+apf, seed 42, measured with freezing: {FROZEN}{GAIN}{BUBBLES}",
    ]
    # What any run of freezing has measured comes first.
    write_batches(tmp_path / "l", "timelyfreeze+lisa", Phase.WARMUP)
    plot = drawn(tmp_path)["timelines"]
    assert titles(plot)[0].startswith("none, measured without freezing by timelyfreeze+lisa")
    assert plot.missing == ("without a batch, measured or planned: 1F1B timelyfreeze+lisa",)


def test_without_none_nothing_is_a_gain(tmp_path: Path) -> None:
    for method in ("apf", "lisa"):
        write_batches(tmp_path / method, method, Phase.UPPER_BOUND, Phase.STABLE)
    plot = drawn(tmp_path)["timelines"]
    assert titles(plot) == [
        f"{method}, seed 42, measured with freezing: {FROZEN}{BUBBLES}"
        for method in ("apf", "lisa")
    ]
    assert [len(panel.lines) for panel in axes_of(plot)] == [0, 0]


def test_each_schedule_and_each_amount_of_work_has_a_figure(tmp_path: Path) -> None:
    short, long = ({"training": {"seq_len": length}} for length in (64, 128))
    for schedule in ("GPipe", "1F1B"):
        what: Any = {"schedule": schedule, "settings": short}
        write_run(tmp_path / schedule / "n", "none", **what)
        write_batches(tmp_path / schedule / "t", "apf", Phase.WARMUP, Phase.STABLE, **what)
    write_batches(tmp_path / "long", "apf", Phase.STABLE, settings=long)
    shown = {name: plot for name, plot in drawn(tmp_path).items() if plot.kind == "timelines"}
    assert [(name, plot.place.split(",")[0]) for name, plot in shown.items()] == [
        ("timelines", "GPipe"), ("timelines_2", "1F1B"), ("timelines_3", "1F1B"),
    ]  # fmt: skip
    names = [[title.partition(", measured")[0] for title in titles(p)] for p in shown.values()]
    apf = "apf, seq_len 64, seed 42"
    assert names == [["none", apf], ["none", apf], ["apf, seq_len 128, seed 42"]]
    assert GAIN in titles(shown["timelines"])[1]
    assert GAIN not in titles(shown["timelines_3"])[0]


def test_a_batch_that_cannot_be_read_is_named_and_spoils_no_other(tmp_path: Path) -> None:
    broken = write_batches(tmp_path / "a", "apf", Phase.STABLE)
    file = broken / "timelines" / "measured_stable.json"
    file.write_text("{")
    write_batches(tmp_path / "l", "lisa", Phase.STABLE)
    plot = drawn(tmp_path)["timelines"]
    assert len(titles(plot)) == 1
    lacking, unread = plot.missing
    assert lacking == "without a batch, measured or planned: 1F1B apf"
    assert unread.startswith("what cannot be read of 1F1B apf seed 42: ")
    assert str(file) in unread


# --- how often tensors were frozen ----------------------------------------------------------------


def bars(axes: Axes) -> list[tuple[float, float]]:
    found = [(bar.get_x(), bar.get_height()) for bar in axes.patches if bar.get_height()]
    return [(round(x, 2), round(height, 2)) for x, height in found]


def test_each_method_has_a_panel_with_the_tensors_of_the_last_rank(tmp_path: Path) -> None:
    write_run(tmp_path / "n", "none")
    write_counts(write_run(tmp_path / "a1", "apf", seed=1), 0, 8)
    write_counts(write_run(tmp_path / "a2", "apf", seed=2), 8, 8)
    write_counts(write_run(tmp_path / "t", "timelyfreeze+apf"), 4, 4)
    write_run(tmp_path / "l", "lisa")
    plot = drawn(tmp_path)["freeze_ratio_histogram"]
    panels = axes_of(plot)
    assert [panel.get_title() for panel in panels] == [
        "apf\nseed 1, rank 1: 2 tensors",
        "timelyfreeze+apf\nseed 42, rank 1: 2 tensors",
    ]
    # Bins of 0.04: never and always frozen, half of the tensors each; then all in half of them.
    assert bars(panels[0]) == [(0.0, 0.5), (0.96, 0.5)]
    assert bars(panels[1]) == [(0.48, 1.0)]
    # The tensor that was always frozen has 20 of 30 elements.
    assert np.allclose([panel.lines[0].get_xdata()[0] for panel in panels], [2 / 3, 0.5])
    assert plot.missing == ("without counts of frozen tensors (frozen_counts.csv): 1F1B lisa",)
    assert "1F1B apf: 2 tensors of rank 1, left out of 67% of backwards" in plot.alt


def test_counts_before_freezing_began_say_nothing(tmp_path: Path) -> None:
    COUNTS.write(write_run(tmp_path / "a", "apf"), [FrozenCount(0, 0, "w", 10, 0, 0)])
    plot = drawn(tmp_path)["freeze_ratio_histogram"]
    assert plot.figure is None
    assert plot.missing == ("no run has counts of frozen tensors (frozen_counts.csv)",)


@pytest.mark.parametrize("kind", ["freeze_ratio_histogram", "timelines"])
def test_names_of_methods_are_no_formulas(tmp_path: Path, kind: str) -> None:
    run = write_batches(tmp_path / "a", "a$b$", Phase.STABLE)
    write_counts(run, 4)
    (axes,) = axes_of(drawn(tmp_path)[kind])
    heads = [axes.title, axes._left_title]
    assert [head.get_parse_math() for head in heads if "a$b$" in head.get_text()] == [False]
