"""What the picture of a front shows, read back from the figure; no pixels are compared."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.text import Text

from timelyfreeze.plots.curves import (
    Decisions,
    convergence_figure,
    curves_figure,
    decisions,
    draw_plasticity,
    front_figure,
    frozen_labels,
    stretches,
)
from timelyfreeze.plots.gallery import draw_front
from timelyfreeze.records.tables import (
    FRONT,
    MOVES,
    PLASTICITY,
    FrontRow,
    Move,
    PlasticityRow,
    StepRow,
)

DEPTHS = [0, 0, 2, 2, 2, 2, 5, 5, 0, 0]
READ = [0, 0, 0, 0, 2, 2, 0, 1, 0, 0]


def rows(*, cached: bool) -> list[FrontRow]:
    """Ten steps of two batches each: two of warm-up, a front of 2 blocks, of 5 blocks, none."""
    return [
        FrontRow(step, "warmup" if step < 3 else "stable", depth, 2, read if cached else None)
        for step, (depth, read) in enumerate(zip(DEPTHS, READ, strict=True), start=1)
    ]


def heights(axes: Axes) -> dict[str, list[float]]:
    """Of each area by its label, how high it is at steps 1, 2, ..., 10."""
    found = {}
    for area in axes.collections:
        assert isinstance(area, PolyCollection)
        corners = area.get_paths()[0].vertices
        found[str(area.get_label())] = [
            float(corners[np.isclose(corners[:, 0], step), 1].max()) for step in (1, 10)
        ] + [float(corners[:, 1].max())]
    return found


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_the_front_is_a_step_for_each_change() -> None:
    (axes,) = front_figure(rows(cached=False), title="fixed").axes
    (line,) = [line for line in axes.get_lines() if len(line.get_xdata()) == 10]
    assert np.asarray(line.get_ydata()).tolist() == DEPTHS
    assert line.get_drawstyle() == "steps-mid", "it changes between two steps"
    assert heights(axes) == {"front": [0.0, 0.0, 5.0]}
    assert texts(axes) == ["warm-up", "stable"]
    assert axes.get_title(loc="left") == "fixed"


def test_moves_are_lines_before_their_first_steps(tmp_path: Path) -> None:
    FRONT.write(tmp_path, rows(cached=False))
    MOVES.write(tmp_path, [Move(3, 2, 4, 1, "4 2 2 2", 1.0), Move(7, 5, 2, 2, "7 3", 1.0)])
    figure = draw_front(tmp_path)
    assert not isinstance(figure, str)
    lines = [line for line in figure.axes[0].get_lines() if line.get_linestyle() == ":"]
    assert [np.asarray(line.get_xdata()).tolist() for line in lines] == [[2.5, 2.5], [6.5, 6.5]]
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names.count("move to another pipeline") == 1


def test_what_was_read_is_a_part_of_the_area_and_its_share_stands_above() -> None:
    """Of the 8 batches behind 2 blocks 4 were read, of the 4 behind 5 blocks one."""
    (axes,) = front_figure(rows(cached=True)).axes
    assert heights(axes) == {
        "front computed": [0.0, 0.0, 5.0],
        "front read from the cache": [0.0, 0.0, 2.5],
    }
    shares = {text.get_text(): text.xy for text in axes.texts if "read" in text.get_text()}  # type: ignore[attr-defined]
    assert shares == {"50% read": (4.5, 2.0), "25% read": (7.5, 5.0)}


def test_a_share_without_room_is_not_written() -> None:
    many = [FrontRow(step, "stable", 1 + (step > 97), 1, 1) for step in range(1, 101)]
    (axes,) = front_figure(many).axes
    assert texts(axes) == ["stable", "100% read"]


def test_stretches_are_steps_with_one_front() -> None:
    found = [[row.step for row in stretch] for stretch in stretches(rows(cached=False))]
    assert found == [[3, 4, 5, 6], [7, 8]]


def test_plasticity_stands_below_where_there_is_any(tmp_path: Path) -> None:
    FRONT.write(tmp_path, rows(cached=False))
    figure = draw_front(tmp_path)
    assert not isinstance(figure, str)
    assert len(figure.axes) == 1
    PLASTICITY.write(tmp_path, [PlasticityRow(3, 0, 0.5, 0.5)])
    figure = draw_front(tmp_path)
    assert not isinstance(figure, str)
    above, below = figure.axes
    assert above.get_xlim() == below.get_xlim()
    assert "plasticity" in below.get_ylabel()


@pytest.mark.parametrize("written", [[], [FrontRow(1, "stable", 0, 1)]])
def test_a_run_that_froze_nothing_says_so(tmp_path: Path, written: list[FrontRow]) -> None:
    assert draw_front(tmp_path) == "front.csv has no step: the run's method freezes no front"
    FRONT.write(tmp_path, written)
    assert draw_front(tmp_path) == "front.csv has no front: nothing was frozen yet"


# Bootstrapping to step 3; module 0 frozen from 5 on, 1 and 2 from 7, all live from 9, 0 from 10.
MODULES = [0, 0, 0, 0, 1, 1, 3, 3, 0, 1]
ROWS = [
    FrontRow(step, "stable", 2 * n, 1, None, n, int(step <= 3))
    for step, n in enumerate(MODULES, start=1)
]
SEEN = [
    PlasticityRow(3, 0, 4.0, 4.0),
    PlasticityRow(4, 0, 2.0, 3.0),
    PlasticityRow(5, 1, 8.0, 8.0),
    PlasticityRow(8, 0, 1.0, 1.0),
]


def drawn(seen: list[PlasticityRow]) -> Axes:
    axes = Figure().subplots()
    draw_plasticity(axes, ROWS, seen)
    return axes


def curves(axes: Axes, label: str) -> list[list[tuple[float, float]]]:
    """The pieces of a curve; those that follow the first have no label but its width."""
    (first,) = [line for line in axes.get_lines() if line.get_label() == label]
    return [
        [tuple(point) for point in np.asarray(line.get_xydata()).tolist()]
        for line in axes.get_lines()
        if line.get_linewidth() == first.get_linewidth() and line.get_marker() == "."
    ]


def marks(axes: Axes, label: str) -> list[float]:
    """Where vertical lines of the colour of a label stand."""
    found = [line for line in axes.get_lines() if line.get_label() == label]
    color = found[0].get_color() if found else None
    return [float(np.asarray(x.get_xdata())[0]) for x in axes.get_lines() if x.get_color() == color]


def test_decisions_are_told_by_the_first_step_in_which_they_hold() -> None:
    assert decisions(ROWS) == Decisions(4, ((5, "0"), (7, "1-2"), (10, "0")), (9,))
    assert decisions(ROWS[3:]) == Decisions(None, ((5, "0"), (7, "1-2"), (10, "0")), (9,))
    plain = [FrontRow(step, "stable", step, 1) for step in (1, 2)]
    assert decisions(plain) == Decisions(None, (), ()), "a policy without modules"


def test_each_module_has_a_curve_of_its_own_whenever_it_is_looked_at() -> None:
    axes = drawn(SEEN)
    assert curves(axes, "plasticity, each evaluation") == [
        [(3.0, 4.0), (4.0, 2.0)], [(5.0, 8.0)], [(8.0, 1.0)],
    ]  # fmt: skip
    assert curves(axes, "plasticity, smoothed") == [
        [(3.0, 4.0), (4.0, 3.0)], [(5.0, 8.0)], [(8.0, 1.0)],
    ]  # fmt: skip
    first, second, third = [line.get_color() for line in axes.get_lines() if line.get_lw() == 0.7]
    assert first == third != second


def test_decisions_are_marked_between_the_steps() -> None:
    axes = drawn(SEEN)
    assert marks(axes, "end of bootstrapping") == [3.5]
    assert marks(axes, "module frozen, its number above") == [4.5, 6.5, 9.5]
    assert marks(axes, "all live again") == [8.5]
    assert {text.get_text(): text.xy[0] for text in axes.texts} == {"1-2": 6.5, "0": 9.5}  # type: ignore[attr-defined]
    assert [text.get_text() for text in axes.texts] == ["0", "1-2", "0"]


def test_a_logarithmic_scale_needs_numbers_above_zero() -> None:
    assert drawn(SEEN).get_yscale() == "log"
    assert drawn([*SEEN, PlasticityRow(9, 0, 0.0, 0.5)]).get_yscale() == "linear"


def test_numbers_that_have_no_room_of_their_own_share_a_place() -> None:
    frozen = [(10, "0"), (12, "1"), (30, "2"), (31, "3-4"), (60, "5")]
    assert list(frozen_labels(frozen, 3)) == [(11, "0, 1"), (30.5, "2, 3-4"), (60, "5")]
    assert list(frozen_labels(frozen, 1)) == [(float(at), name) for at, name in frozen]


# Last steps of the phases of the default run, whose ramp is one step.
PHASES = {"warmup": 10, "mixed": 18, "ramp": 19, "stable": 120}
HALVES = {"warmup": 3, "upper_bound": 6, "lower_bound": 9, "ramp": 11, "stable": 200}


def steps(phases: dict[str, int]) -> list[StepRow]:
    last_step = max(phases.values())
    names = [next(p for p, end in phases.items() if t <= end) for t in range(1, last_step + 1)]
    return [
        StepRow(t, name, float(t), 10.0, 5.0, None, 0.5, 9.0, 9.0, 2.0, 0.9, 0.8)
        for t, name in enumerate(names, start=1)
    ]


def fronts(phases: dict[str, int]) -> list[FrontRow]:
    return [FrontRow(row.step, row.phase, 2, 2, None) for row in steps(phases)]


@pytest.mark.parametrize("phases", [PHASES, HALVES], ids=["mixed", "halves"])
@pytest.mark.parametrize(
    "draw",
    [
        lambda phases: convergence_figure(steps(phases), "a run"),
        lambda phases: curves_figure(steps(phases), title="a run"),
        lambda phases: front_figure(fronts(phases), title="a run"),
    ],
    ids=["convergence", "curves", "front"],
)
def test_no_label_is_printed_over_another(
    draw: Callable[[dict[str, int]], Figure], phases: dict[str, int]
) -> None:
    figure = draw(phases)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts: list[Text] = []
    for axes in figure.axes:
        texts += [*axes.texts, axes.yaxis.label, axes._left_title]
    renderer = canvas.get_renderer()
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts]
    assert [
        (a, b) for (a, one), (b, other) in combinations(boxes, 2) if a and b and one.overlaps(other)
    ] == []


def test_an_empty_panel_says_why() -> None:
    """A phase in which nothing freezes has no ratio of kappa and p_eff."""
    why = "no step has both kappa and p_eff"
    for phase, is_empty in (("warmup", True), ("stable", False)):
        (_, below) = convergence_figure(steps({phase: 5})).axes
        assert (why in texts(below)) == is_empty
