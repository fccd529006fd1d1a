"""What the picture of plasticity shows, read back from the axes; no pixels are compared."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from timelyfreeze.plots.front import Decisions, decisions, draw_plasticity, frozen_labels
from timelyfreeze.records.tables import FrontRow, PlasticityRow

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
