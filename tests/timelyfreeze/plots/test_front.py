"""What the picture of a front shows, read back from the figure; no pixels are compared."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from timelyfreeze.plots.front import front_figure, stretches
from timelyfreeze.plots.gallery import draw_front
from timelyfreeze.records.tables import FRONT, MOVES, PLASTICITY, FrontRow, Move, PlasticityRow

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
    with pytest.raises(ValueError, match=r"front\.csv has no step yet"):
        front_figure([])
