"""Plots over the steps of a run: freeze ratio, throughput, losses and the frozen front.

Fig. 4 of arXiv:2602.05754, and Figs. 1 and 2 of Egeria.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NamedTuple, TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from timelyfreeze.plots import style
from timelyfreeze.records import tables
from timelyfreeze.records.convergence import kappa_over_p_eff
from timelyfreeze.settings import FREEZING_PHASES, Phase

_WINDOW = 7
# Both have a line for each step: its number and the name of its phase, "" without freezing.
StepOfPhase = tables.StepRow | tables.FrontRow
AnyRow = TypeVar("AnyRow", tables.StepRow, tables.FrontRow)


@contextmanager
def steps_figure(
    rows: Sequence[StepOfPhase], title: str, height: float, n_panels: int = 1, ncols: int = 3
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Give a figure with panels over a run's steps, of ``height`` inches together.

    All panels shade the phases and have a legend.
    """
    with style.house_style():
        figure = Figure(figsize=(style.WIDTH_INCHES, height), layout="constrained")
        panels = list(figure.subplots(n_panels, 1, sharex=True, squeeze=False)[:, 0])
        for axes in panels:
            shade_phases(axes, rows, named=axes is panels[0])
        yield figure, panels
        panels[-1].set_xlabel("optimizer step")
        panels[0].set_title(title, loc="left", pad=28 if bands(rows) else 8)
        figure.legend(loc="outside lower center", ncols=ncols)


def curves_figure(
    rows: Sequence[tables.StepRow], title: str = "", n_emulated: int = 1, unit: str = "tokens"
) -> Figure:
    """Draw freeze ratio and speed of all steps, by an emulation's virtual clock.

    Throughput is pale step by step, and the median of ``_WINDOW`` steps, to show its course.
    """
    rows = without_control(rows)
    values, blue = speeds(rows, n_emulated), style.BLUE
    medians, ratios = running_medians(rows, values), [row.freeze_ratio for row in rows]
    with steps_figure(rows, title, 3.6) as (figure, (below,)):
        above = below.twinx()
        label = "fraction of all elements that the step froze (right)"
        draw_by_phase(above, rows, ratios, color=blue, lw=1.8, label=label)
        above.set_ylim(0, 1.05)
        above.set_ylabel("freeze ratio", color=blue)
        above.tick_params(axis="y", labelcolor=blue)
        above.spines["right"].set(visible=True, color=blue)
        pale: Any = {"lw": 0.6, "alpha": 0.5, "label": "each step"}
        below.plot([row.step for row in rows], values, color=style.FAINT_INK, **pale)
        label = f"throughput, median of {_WINDOW} steps (left)"
        draw_by_phase(below, rows, medians, color=style.INK, lw=1.8, label=label)
        is_virtual = any(row.virtual_step_ms is not None for row in rows)
        below.set_ylabel(f"{unit}/s per device" + (", virtual clock" if is_virtual else ""))
        below.set_ylim(bottom=0)
        below.yaxis.set_major_formatter("{x:,.0f}")
    return figure


def speeds(rows: Sequence[tables.StepRow], n_emulated: int = 1) -> list[float]:
    """Return throughput per device of each step, by the virtual clock if any."""
    return [
        row.tokens_per_second * row.step_ms / row.virtual_step_ms / n_emulated
        if row.virtual_step_ms
        else row.tokens_per_second
        for row in rows
    ]


def running_medians(rows: Sequence[tables.StepRow], values: Sequence[float]) -> list[float]:
    """Return by step the median of nearby steps of the same phase."""
    half, pairs = _WINDOW // 2, list(zip(rows, values, strict=True))
    return [
        statistics.median(v for r, v in pairs[max(0, i - half) : i + half + 1] if r.phase == phase)
        for i, phase in enumerate(row.phase for row in rows)
    ]


_FREEZING = {phase.value for phase in FREEZING_PHASES}


def convergence_figure(rows: Sequence[tables.StepRow], title: str = "") -> Figure:
    """Draw cost and updates of a step, and the paper's ratio of the two."""
    rows = without_control(rows)
    kappa, p_eff = [row.kappa for row in rows], [row.p_eff for row in rows]
    # Before freezing begins, and while everything is frozen to measure, the two say nothing.
    ratios = [
        kappa_over_p_eff(row.kappa, row.p_eff) if row.phase in _FREEZING else None for row in rows
    ]
    known = [ratio for ratio in ratios if ratio is not None and math.isfinite(ratio)]
    with steps_figure(rows, title, 4.8, n_panels=2) as (figure, (above, below)):
        for axes, values, label, color, marker in (
            (above, kappa, "kappa: time of a step", style.BLUE, "o"),
            (above, p_eff, "p_eff: gradient energy that is updated", style.ORANGE, "s"),
            (below, ratios, "kappa / p_eff, of arXiv:2602.05754", style.VERMILLION, "D"),
        ):
            draw_by_phase(axes, rows, values, label=label, color=color, marker=marker, ms=3, lw=1.4)
        above.set_ylim(bottom=0)
        above.set_ylabel("fraction of the\nunfrozen step")
        below.axhline(1.0, color=style.INK, lw=0.9, ls=(0, (4, 3)), label="as without freezing")
        why = "" if known else "no step has both kappa and p_eff"
        style.annotate(below, why, (0.5, 0.5), "axes fraction", ha="center")
        below.set_ylim(bottom=0, top=max([1.4, *(1.08 * ratio for ratio in known)]))
        below.set_ylabel("of the run\nwithout freezing")
        for axes in (above, below):
            axes.grid(axis="y")
    return figure


def loss_figure(rows: Sequence[tables.LossRow], title: str = "") -> Figure:
    """Draw the losses of a run against steps and against seconds.

    Logged training losses are pale beside their running mean, the source of times to a loss.
    Validation losses are points.
    """
    trained = [(row, row.train_loss) for row in rows if row.train_loss is not None]
    validated = [(row, row.validation_loss) for row in rows if row.validation_loss is not None]
    losses = [loss for _, loss in trained]
    window = tables.WINDOW if len(losses) >= 2 * tables.WINDOW else 1
    label = "this run: training" + (f", mean of {window} logged" if window > 1 else "")
    with style.house_style():
        figure = Figure(figsize=(style.WIDTH_INCHES, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, place in ((left, "step"), (right, "seconds")):
            ends = [float(getattr(row, place)) for row, _ in trained]
            if window > 1:
                axes.plot(ends, losses, color=style.BLUE, lw=0.7, alpha=0.35, label="each logged")
            axes.plot(ends[window - 1 :], tables.running_means(losses, window),
                      color=style.BLUE, lw=1.8, label=label)  # fmt: skip
            if validated:
                at = [float(getattr(row, place)) for row, _ in validated]
                heights = [loss for _, loss in validated]
                axes.plot(at, heights, color=style.BLUE, marker="o", ms=4, lw=0,
                          mec=style.FAINT_INK, mew=0.5, label="this run: validation")  # fmt: skip
            axes.grid(axis="y")
            axes.set_xlim(left=0)
        left.set(xlabel="optimizer step", ylabel="loss")
        right.set(xlabel="seconds of training")
        figure.suptitle(title, x=0.01, ha="left")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


# Of a name above the axes, on average, were the axes as wide as the figure.
_LETTER_INCHES = 0.65 * style.SMALL_POINTS / 72

# The shade behind each phase, and its name: short, to fit over a narrow band.
_LOOKS = {
    Phase.ADAPTERS: ("#F1F1F1", "adapters"),
    Phase.WARMUP: ("#FFFFFF", "warm-up"),
    Phase.UPPER_BOUND: ("#F1F1F1", "nothing\nfrozen"),
    Phase.LOWER_BOUND: ("#E2E2E2", "all\nfrozen"),
    Phase.MIXED: ("#EAEAEA", "monitoring"),
    Phase.RAMP: ("#F6F6F6", "ramp"),
    Phase.STABLE: ("#FFFFFF", "stable"),
    Phase.OFF: ("#EAEAEA", "off"),
}


def without_control(rows: Sequence[AnyRow]) -> list[AnyRow]:
    """Return the rows without control steps, spikes in any curve."""
    return [row for row in rows if row.phase != Phase.CONTROL.value]


class Band(NamedTuple):
    """A phase with its first and its last step."""

    phase: Phase
    first: int
    last: int


def bands(rows: Sequence[StepOfPhase]) -> list[Band]:
    """Return the phases of a run in order; empty for one without freezing."""
    found = []
    for name, group in groupby(rows, key=lambda row: row.phase):
        steps = [row.step for row in group]
        if name:
            found.append(Band(Phase(name), steps[0], steps[-1]))
    return found


def draw_by_phase(
    axes: Axes, rows: Sequence[StepOfPhase], values: Sequence[float | None], **look: Any
) -> None:
    """Draw a curve over steps with a gap at the end of a phase, before another regime."""
    pairs = zip(rows, values, strict=True)
    for _, group in groupby(pairs, key=lambda pair: pair[0].phase):
        known = [(row.step, value) for row, value in group if value is not None]
        if known:
            steps, heights = zip(*known, strict=True)
            axes.plot(steps, heights, **look)
            look["label"] = "_"  # once in the legend


def shade_phases(axes: Axes, rows: Sequence[StepOfPhase], *, named: bool = True) -> None:
    """Shade the phases of a run in the background."""
    free = -math.inf  # where the next name may begin: phases may be narrower than their names
    for band in bands(rows):
        begin, end = band.first - 0.5, band.last + 0.5
        shade, word = _LOOKS[band.phase]
        axes.axvspan(begin, end, color=shade, lw=0, zorder=0)
        axes.axvline(begin, color=style.FAINT_INK, lw=0.5, zorder=0.5)
        if named:
            letters = max(map(len, word.split("\n"))) + 1
            wide = letters * _LETTER_INCHES * axes.figure.dpi / axes.figure.bbox.width
            half = wide * (rows[-1].step - rows[0].step + 1) / 2
            middle = max((begin + end) / 2, free + half)
            free = middle + half
            at, place = (middle, 1.0), ("data", "axes fraction")
            style.annotate(axes, word, at, place, shift=(0, 3), ha="center", va="bottom")
    if rows:
        axes.set_xlim(rows[0].step - 0.5, rows[-1].step + 0.5)


# Of the width of the axes, what a stretch has to have for its share to be written above it.
_LEAST_WIDTH = 0.06


def front_figure(
    rows: Sequence[tables.FrontRow],
    evaluations: Sequence[tables.PlasticityRow] = (),
    title: str = "",
    moves: Sequence[tables.Move] = (),
) -> Figure:
    """Draw the number of frozen blocks by step, and below the plasticity behind it.

    With an activation cache, rows read from the cache are darker, with their share above.
    """
    rows, n_panels = without_control(rows), 2 if evaluations else 1
    with steps_figure(rows, title, 1.4 + 2.2 * n_panels, n_panels, ncols=4) as (figure, panels):
        _draw_front(panels[0], rows)
        for i, move in enumerate(moves):
            label = "_" if i else "move to another pipeline"  # once in the legend
            panels[0].axvline(move.step - 0.5, color=style.VERMILLION, lw=0.8, ls=":", label=label)
        if evaluations:
            draw_plasticity(panels[1], rows, evaluations)
    return figure


def _draw_front(axes: Axes, rows: Sequence[tables.FrontRow]) -> None:
    steps = [row.step for row in rows]
    layers = [row.frozen_layers for row in rows]
    is_cached = any(row.read is not None for row in rows)
    label = "front computed" if is_cached else "front"
    axes.fill_between(steps, layers, step="mid", color=style.SKY, alpha=0.4, lw=0, label=label)
    if is_cached:
        read = [row.frozen_layers * (row.read or 0) / row.batches for row in rows]
        label = "front read from the cache"
        axes.fill_between(steps, read, step="mid", color=style.BLUE, alpha=0.6, lw=0, label=label)
        least_steps = _LEAST_WIDTH * (rows[-1].step - rows[0].step + 1)
        for stretch in stretches(rows):
            first, last = stretch[0].step, stretch[-1].step
            if last - first + 1 >= least_steps:
                n_read = sum(row.read or 0 for row in stretch)
                share = f"{100 * n_read / sum(row.batches for row in stretch):.0f}% read"
                at = ((first + last) / 2, float(stretch[0].frozen_layers))
                style.annotate(axes, share, at, "data", shift=(0, 3), ha="center", va="bottom")
    axes.plot(steps, layers, drawstyle="steps-mid", color=style.INK, lw=1.4, label="frozen blocks")
    axes.set_ylim(0, 1.25 * max(1, *layers))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("frozen blocks")


def stretches(rows: Sequence[tables.FrontRow]) -> Iterator[list[tables.FrontRow]]:
    """Yield stretches of steps with the same front."""
    for n_layers, group in groupby(rows, key=lambda row: row.frozen_layers):
        if n_layers:
            yield list(group)


# Modules that follow each other; the number of each stands where it was frozen.
_COLORS = (style.BLUE, style.ORANGE)
# Of the width of the axes, below which numbers of frozen modules share a place.
_LEAST_DISTANCE = 0.03


@dataclass(frozen=True)
class Decisions:
    """The steps since a decision holds."""

    guided: int | None  # bootstrapping is over; None if it never was, or before the first row
    frozen: tuple[tuple[int, str], ...]  # and the numbers of modules frozen together, as in "2-4"
    unfrozen: tuple[int, ...]  # everything is live again


def decisions(rows: Sequence[tables.FrontRow]) -> Decisions:
    """Return a policy's decisions over some steps."""
    guided = [b.step for a, b in pairwise(rows) if (a.bootstrapping, b.bootstrapping) == (1, 0)]
    changes = [(b.step, a.frozen_modules or 0, b.frozen_modules or 0) for a, b in pairwise(rows)]
    return Decisions(
        guided[0] if guided else None,
        tuple((step, f"{a}" if b == a + 1 else f"{a}-{b - 1}") for step, a, b in changes if b > a),
        tuple(step for step, a, b in changes if b < a),
    )


def draw_plasticity(
    axes: Axes, rows: Sequence[tables.FrontRow], evaluations: Sequence[tables.PlasticityRow]
) -> None:
    """Draw a module's curve while observed, and mark decisions."""
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
    # A line where each decision begins to hold, between two steps.
    decided, n_steps = decisions(rows), rows[-1].step - rows[0].step + 1
    looks: list[tuple[str, Sequence[int], Any]] = [
        ("end of bootstrapping", [decided.guided] if decided.guided else [],
         {"color": style.INK, "lw": 1.2, "ls": ":"}),
        ("module frozen, its number above", [step for step, _ in decided.frozen],
         {"color": style.VERMILLION, "lw": 0.9}),
        ("all live again", decided.unfrozen, {"color": style.GREEN, "lw": 1.6, "ls": (0, (4, 2))}),
    ]  # fmt: skip
    for name, begins, look in looks:
        for i, step in enumerate(begins):  # once in the legend
            axes.axvline(step - 0.5, label="_" if i else name, zorder=1, **look)
    for at, numbers in frozen_labels(decided.frozen, _LEAST_DISTANCE * n_steps):
        look = {"shift": (0, 2), "color": style.VERMILLION, "ha": "center", "va": "bottom"}
        style.annotate(axes, numbers, (at - 0.5, 1.0), ("data", "axes fraction"), **look)


def frozen_labels(
    frozen: Sequence[tuple[int, str]], least_distance: float
) -> Iterator[tuple[float, str]]:
    """Yield places and texts of modules' numbers; close numbers share a text."""
    together: list[list[tuple[int, str]]] = []
    for step, modules in frozen:
        if together and step - together[-1][0][0] < least_distance:
            together[-1].append((step, modules))
        else:
            together.append([(step, modules)])
    for group in together:
        yield (group[0][0] + group[-1][0]) / 2, ", ".join(modules for _, modules in group)
