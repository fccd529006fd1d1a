"""Files of plots: valid, small, and the same again."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from timelyfreeze.plots.style import house_style, panels, save


def a_figure() -> Figure:
    with house_style():
        figure = Figure(figsize=(3.0, 2.0))
        figure.subplots().plot([0, 1], [1, 0], label="line")
    return figure


def test_both_files_can_be_read(tmp_path: Path) -> None:
    png, svg = save(a_figure(), tmp_path / "plots", "line")
    assert sorted(p.name for p in (tmp_path / "plots").iterdir()) == ["line.png", "line.svg"]
    with Image.open(png) as image:
        image.load()
        assert image.size == (450, 300)
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")


def test_the_same_data_gives_the_same_files(tmp_path: Path) -> None:
    first, second = (save(a_figure(), tmp_path / name, "line") for name in ("a", "b"))
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]


def test_a_plot_that_would_be_large_loses_resolution(tmp_path: Path) -> None:
    figure = Figure(figsize=(6.0, 4.0))
    noise = np.random.default_rng(0).random((300, 600))
    figure.add_axes((0.0, 0.0, 1.0, 1.0)).imshow(noise, aspect="auto", interpolation="nearest")
    png, _ = save(figure, tmp_path, "noise")
    with Image.open(png) as image:
        assert image.size[0] < 900


def test_settings_of_others_come_back() -> None:
    before = matplotlib.rcParams["font.size"]
    with house_style():
        matplotlib.rcParams["font.size"] = 99.0
    assert matplotlib.rcParams["font.size"] == before


def test_the_lowest_panel_of_each_column_names_its_axis() -> None:
    _, axes = panels(list("abcde"), 1.0, "t", x_label="x", y_label="y", sharey=True)
    assert [panel.get_xlabel() for panel in axes] == ["", "", "x", "x", "x"]
    assert [panel.get_ylabel() for panel in axes] == ["y", "", "", "y", ""]


@pytest.mark.parametrize(
    ("n", "rows"),
    [(1, [1]), (4, [4]), (5, [3, 2]), (6, [3, 3]), (7, [4, 3]), (8, [4, 4]), (9, [3, 3, 3])],
)
def test_rows_are_as_even_as_can_be(n: int, rows: list[int]) -> None:
    _, axes = panels(["a"] * n, 1.0, "t", x_label="x", y_label="y", sharey=True)
    heights = [round(panel.get_position().y0, 6) for panel in axes]
    assert [heights.count(height) for height in sorted(set(heights), reverse=True)] == rows
