"""Words of plots lie beside each other, read back from the figure."""

from collections.abc import Callable
from itertools import combinations

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from timelyfreeze.plots.curves import convergence_figure, curves_figure
from timelyfreeze.plots.front import front_figure
from timelyfreeze.records.tables import FrontRow, StepRow

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
