"""Plasticity of the frontmost live module over steps, and what was decided by it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from matplotlib.axes import Axes

from timelyfreeze.plots.style import BLUE, GREEN, INK, ORANGE, VERMILLION, annotate
from timelyfreeze.records import FrontRow, PlasticityRow

# Modules that follow each other; the number of each stands where it was frozen.
_COLORS = (BLUE, ORANGE)
# Of the width of the axes, below which numbers of frozen modules share a place.
_LEAST_DISTANCE = 0.03


@dataclass(frozen=True)
class Decisions:
    """The steps since which something holds.

    Attributes:
        guided: Bootstrapping is over; None if it never was, or was before the first row.
        frozen: Step and numbers of modules that were frozen together, such as "2" or "2-4".
        unfrozen: Everything is live again.
    """

    guided: int | None
    frozen: tuple[tuple[int, str], ...]
    unfrozen: tuple[int, ...]


def decisions(rows: Sequence[FrontRow]) -> Decisions:
    """Return what a policy has decided in the course of some steps."""
    guided = [b.step for a, b in pairwise(rows) if (a.bootstrapping, b.bootstrapping) == (1, 0)]
    changes = [(b.step, a.frozen_modules or 0, b.frozen_modules or 0) for a, b in pairwise(rows)]
    return Decisions(
        guided[0] if guided else None,
        tuple((step, f"{a}" if b == a + 1 else f"{a}-{b - 1}") for step, a, b in changes if b > a),
        tuple(step for step, a, b in changes if b < a),
    )


def draw_plasticity(
    axes: Axes, rows: Sequence[FrontRow], evaluations: Sequence[PlasticityRow]
) -> None:
    """Draw a curve for each module while it was looked at, and mark decisions.

    Args:
        axes: With steps along the x axis.
        rows: Steps of the run.
        evaluations: In the order in which they were taken into account.
    """
    labels = ["plasticity, each evaluation", "plasticity, smoothed"]
    for module, group in groupby(evaluations, key=lambda found: found.module):
        found = list(group)
        look: Any = {"color": _COLORS[module % len(_COLORS)], "marker": "."}
        steps = [one.step for one in found]
        axes.plot(steps, [one.plasticity for one in found], lw=0.7, ms=3, alpha=0.6,
                  label=labels[0], **look)  # fmt: skip
        axes.plot(steps, [one.smoothed for one in found], lw=2.0, ms=5, label=labels[1], **look)
        labels = ["_", "_"]  # once in the legend
    is_positive = all(found.plasticity > 0.0 for found in evaluations)
    axes.set_yscale("log" if is_positive else "linear")
    axes.set_ylabel("plasticity of the\nfrontmost live module")
    _mark(axes, decisions(rows), rows[-1].step - rows[0].step + 1)


def _mark(axes: Axes, decided: Decisions, n_steps: int) -> None:
    """Draw a line where each decision begins to hold, between two steps."""
    looks: list[tuple[str, Sequence[int], Any]] = [
        ("end of bootstrapping", [decided.guided] if decided.guided else [],
         {"color": INK, "lw": 1.2, "ls": ":"}),
        ("module frozen, its number above", [step for step, _ in decided.frozen],
         {"color": VERMILLION, "lw": 0.9}),
        ("all live again", decided.unfrozen, {"color": GREEN, "lw": 1.6, "ls": (0, (4, 2))}),
    ]  # fmt: skip
    for name, steps, look in looks:
        label = name
        for step in steps:
            axes.axvline(step - 0.5, label=label, zorder=1, **look)
            label = "_"
    for at, numbers in frozen_labels(decided.frozen, _LEAST_DISTANCE * n_steps):
        place, look = ("data", "axes fraction"), {"ha": "center", "va": "bottom"}
        annotate(axes, numbers, (at - 0.5, 1.0), place, shift=(0, 2), color=VERMILLION, **look)


def frozen_labels(
    frozen: Sequence[tuple[int, str]], least_distance: float
) -> Iterator[tuple[float, str]]:
    """Yield where to write which modules' numbers; those too close to each other are one text."""
    together: list[list[tuple[int, str]]] = []
    for step, modules in frozen:
        if together and step - together[-1][0][0] < least_distance:
            together[-1].append((step, modules))
        else:
            together.append([(step, modules)])
    for group in together:
        yield (group[0][0] + group[-1][0]) / 2, ", ".join(modules for _, modules in group)
