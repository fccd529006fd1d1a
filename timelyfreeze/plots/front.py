"""The frozen front over the steps of a run, and how it came about (Egeria's Figs. 1 and 2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from timelyfreeze.plots.curves import bands, shade_phases
from timelyfreeze.plots.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    SKY,
    VERMILLION,
    WIDTH_INCHES,
    annotate,
    house_style,
)
from timelyfreeze.records import FrontRow, Move, PlasticityRow

# Of the width of the axes, what a stretch has to have for its share to be written above it.
_LEAST_WIDTH = 0.06


def front_figure(
    rows: Sequence[FrontRow],
    evaluations: Sequence[PlasticityRow] = (),
    title: str = "",
    moves: Sequence[Move] = (),
) -> Figure:
    """Draw how many blocks were frozen in each step, and below it the plasticity that decided.

    With an activation cache, the part of the area that stands for batches read from it is darker,
    and their share of each stretch between two changes of the front is written above it.

    Args:
        rows: The steps.
        evaluations: Of the policy's modules; none for policies that have no modules.
        title: Stands above.
        moves: To other pipelines, each a thin line before its first step.

    Raises:
        ValueError: If there is no step.
    """
    if not rows:
        raise ValueError("front.csv has no step yet; there is nothing to draw")
    n_panels = 2 if evaluations else 1
    with house_style():
        figure = Figure(figsize=(WIDTH_INCHES, 1.4 + 2.2 * n_panels), layout="constrained")
        panels = figure.subplots(n_panels, 1, sharex=True, squeeze=False)[:, 0]
        shade_phases(panels[0], rows)
        _draw_front(panels[0], rows)
        for i, move in enumerate(moves):
            label = "_" if i else "move to another pipeline"  # once in the legend
            panels[0].axvline(move.step - 0.5, color=VERMILLION, lw=0.8, ls=":", label=label)
        if evaluations:
            draw_plasticity(panels[1], rows, evaluations)
            shade_phases(panels[1], rows, named=False)
        panels[-1].set_xlabel("optimizer step")
        panels[0].set_title(title, loc="left", pad=28 if bands(rows) else 8)
        figure.legend(loc="outside lower center", ncols=4)
    return figure


def _draw_front(axes: Axes, rows: Sequence[FrontRow]) -> None:
    steps = [row.step for row in rows]
    layers = [row.frozen_layers for row in rows]
    is_cached = any(row.read is not None for row in rows)
    label = "front computed" if is_cached else "front"
    axes.fill_between(steps, layers, step="mid", color=SKY, alpha=0.4, lw=0, label=label)
    if is_cached:
        read = [row.frozen_layers * (row.read or 0) / row.batches for row in rows]
        label = "front read from the cache"
        axes.fill_between(steps, read, step="mid", color=BLUE, alpha=0.6, lw=0, label=label)
        for stretch in stretches(rows):
            _write_share(axes, stretch, n_steps=rows[-1].step - rows[0].step + 1)
    axes.plot(steps, layers, drawstyle="steps-mid", color=INK, lw=1.4)
    axes.set_ylim(0, 1.25 * max(1, *layers))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("frozen blocks")


def stretches(rows: Sequence[FrontRow]) -> Iterator[list[FrontRow]]:
    """Yield steps in a row with the same front, where there is one."""
    for n_layers, group in groupby(rows, key=lambda row: row.frozen_layers):
        if n_layers:
            yield list(group)


def _write_share(axes: Axes, stretch: Sequence[FrontRow], n_steps: int) -> None:
    """Write above a stretch of the front which share of its batches was read."""
    first, last = stretch[0], stretch[-1]
    if last.step - first.step + 1 < _LEAST_WIDTH * n_steps:
        return
    share = sum(row.read or 0 for row in stretch) / sum(row.batches for row in stretch)
    at = ((first.step + last.step) / 2, float(first.frozen_layers))
    annotate(axes, f"{100 * share:.0f}% read", at, "data", shift=(0, 3), ha="center", va="bottom")


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
