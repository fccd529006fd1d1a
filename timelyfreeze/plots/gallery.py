"""Every plot and trace that a run folder can give. A new one is a line here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from timelyfreeze.plots.run_curves import (
    draw_convergence,
    draw_curves,
    draw_histogram,
    draw_loss,
    draw_response,
)
from timelyfreeze.plots.run_timelines import (
    draw_measured,
    draw_predicted,
    trace_measured,
    trace_predicted,
)

# Name of the files, and a function of the run folder: the plot, or why there is none. A file
# that is there and cannot be read is a ValueError. What stands before the first "_" groups plots
# in TensorBoard.
PICTURES: tuple[tuple[str, Callable[[Path], Figure | str]], ...] = (
    ("timeline_measured", draw_measured),
    ("timeline_predicted", draw_predicted),
    ("curves", draw_curves),
    ("loss", draw_loss),
    ("convergence", draw_convergence),
    ("response", draw_response),
    ("histogram", draw_histogram),
)

# Likewise; the text of the file, or None where the plot of the same data says why.
TRACES: tuple[tuple[str, Callable[[Path], str | None]], ...] = (
    ("trace_measured", trace_measured),
    ("trace_predicted", trace_predicted),
)
