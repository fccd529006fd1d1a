"""The times of backwards by what is frozen of them, and the line that a plan assumes."""

from __future__ import annotations

from tests.timelyfreeze.plots.folders import lines
from timelyfreeze.plots.response import assumed_lines, response_figure
from timelyfreeze.records.tables import ResponseRow


def test_only_monitoring_makes_the_line() -> None:
    rows = [
        ResponseRow(0, "B", "mixed", 0, 0.0, 8.0),
        ResponseRow(0, "B", "mixed", 0, 1.0, 2.0),
        ResponseRow(0, "B", "stable", 0, 1.0, 50.0),
        ResponseRow(0, "B", "lower_bound", 0, 1.0, 0.1, cut=1),
    ]
    assert assumed_lines(rows) == {"": (8.0, 2.0)}
    assert assumed_lines(rows[1:]) == {}


def test_each_way_of_freezing_the_first_stage_has_its_line() -> None:
    rows = [
        ResponseRow(0, "B", f"profile {way}", -1, fraction, ms)
        for way, ends in (("all_or_nothing", (8.0, 0.5)), ("per_tensor", (8.0, 4.0)))
        for fraction, ms in zip((0.0, 1.0), ends, strict=True)
    ]
    assert assumed_lines(rows) == {
        "all_or_nothing": (8.0, 0.5),
        "per_tensor": (8.0, 4.0),
    }
    (axes,) = response_figure(rows).axes
    assert lines(axes)["what a plan assumes, per_tensor"] == [[(0.0, 8.0), (1.0, 4.0)]]


def test_outliers_are_counted_and_backwards_that_nobody_needs_have_a_mark() -> None:
    rows = [ResponseRow(0, "B", "stable", 0, 0.5, 5.0) for _ in range(99)]
    rows += [
        ResponseRow(0, "B", "stable", 0, 0.5, 90.0),
        ResponseRow(0, "B", "stable", 0, 1, 0.1, 1),
    ]
    (axes,) = response_figure(rows).axes
    assert [text.get_text() for text in axes.texts] == ["1 slower"]
    assert lines(axes)["without an input gradient, which nobody needs"] == [[(1.0, 0.1)]]
