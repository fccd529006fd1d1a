"""Drawings of points, curves, stage ratios and examples: a panel per schedule.

A method's colour is the same everywhere.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from timelyfreeze.compare.curves import Curve, Example, OfGroup, Point, StageRatios, front
from timelyfreeze.compare.groups import SCHEDULES, Group
from timelyfreeze.compare.runs.variants import FEWER_MICROBATCHES, FEWER_STEPS, freezes, split_peer
from timelyfreeze.plots import style
from timelyfreeze.plots.response import frequencies_figure
from timelyfreeze.plots.timeline import timeline_figure
from timelyfreeze.records.tables import FrozenCount
from timelyfreeze.records.timeline import Timeline

T = TypeVar("T", bound=Group | OfGroup)

_COLORS = {
    "none": style.BLACK, "timelyfreeze": style.BLUE, "apf": style.ORANGE,
    "autofreeze": style.GREEN, "pipetransformer": style.VERMILLION, "smartpipe": style.SKY,
    "fixed": style.FAINT_INK, "linear": style.PURPLE, "lisa": style.YELLOW,
    "egeria": style.BROWN, "lora": style.OLIVE,
}  # fmt: skip
_MARKERS = dict(zip(SCHEDULES, ("o", "s", "^", "D", "v", "P"), strict=True))
_OTHER_MARKER = "X"
_PLAN, _FIRST = "timelyfreeze+", "lora+"
_RATIOS = LinearSegmentedColormap.from_list("ratios", ["#FFFFFF", style.SKY, style.BLUE])

_TOP, _BOTTOM, _RIGHT = 0.4, 0.55, 0.3  # inches around the axes of a panel
_HEAD = 0.65  # inches for the title
_LABELS = 1.45  # inches for names right of curves
_NARROW = 7.0  # inches, of a plot with one panel


def by_schedule(found: Sequence[T]) -> dict[str, list[T]]:
    """Return ``found`` by schedule, in the order of the table."""
    panels: dict[str, list[T]] = {}
    for one in found:
        panels.setdefault(one.schedule, []).append(one)
    return panels


def color(method: str) -> str:
    """Return a method's colour: a plan's by its metric, a peer's by its method."""
    _, method = split_peer(method) or ("", method)
    metric = method.removeprefix(_FIRST).removeprefix(_PLAN)
    others = style.CYCLE[:-1]
    return _COLORS.get(metric) or others[sum(map(ord, metric)) % len(others)]


def line_style(method: str) -> str:
    """Return the line of ``method``: dashed with a plan or after adapters, dotted for peers."""
    if peer := split_peer(method):
        return {FEWER_STEPS: ":", FEWER_MICROBATCHES: "-."}[peer[0]]
    return "--" if method.startswith((_PLAN, _FIRST)) else "-"


def draw_points(
    points: Sequence[Point], title: str, place: str, *, y_label: str, low_is_good: bool,
    models: Mapping[str, Sequence[Point]] | None = None,
) -> Figure:  # fmt: skip
    """Draw quality against speed, better towards the upper right, and the unbeaten front.

    All panels of a model have the same limits; ``models`` have rows of their own.
    """
    panels = {model: by_schedule(own) for model, own in (models or {"": points}).items()}
    wide = any(len(own) > 1 for own in panels.values())
    names: list[str] = []
    for model, own in panels.items():
        names += [f"{model}\n{schedule}".lstrip() for schedule in own]
        names += [""] * (len(names) % 2 if wide else 0)
    figure, axes = _panels(names, title, place, names=_LABELS)
    left = iter(axes)
    for own in panels.values():
        _draw_trade_offs(left, own, y_label, low_is_good=low_is_good)
    return figure


def _draw_trade_offs(
    axes: Iterator[Axes], panels: Mapping[str, Sequence[Point]], y_label: str, *, low_is_good: bool
) -> None:
    everything = [point for points in panels.values() for point in points]
    x_limits = _limits([v for p in everything for v in (p.x.low, p.x.high)])
    y_limits = _limits([v for p in everything for v in (p.y.low, p.y.high)])
    for schedule, points in panels.items():
        one = next(axes)
        one.set(xlim=x_limits, ylim=y_limits[::-1] if low_is_good else y_limits,
                xlabel=f"{everything[0].group.unit}/s per device", ylabel=y_label)  # fmt: skip
        one.grid(visible=True)
        best = front(points, low_is_good=low_is_good)
        one.plot([p.x.mean for p in best], [p.y.mean for p in best],
                 color=style.GRID, linewidth=3.0, zorder=1)  # fmt: skip
        marker = _MARKERS.get(schedule, _OTHER_MARKER)
        for point in points:
            x, y, method = point.x, point.y, point.group.method
            edge, width = (style.BLUE, 1.6) if method.startswith(_PLAN) else (style.INK, 0.8)
            one.errorbar(
                x.mean, y.mean, fmt=marker, markersize=7, markerfacecolor=color(method),
                xerr=[[x.mean - x.low], [x.high - x.mean]],
                yerr=[[y.mean - y.low], [y.high - y.mean]], markeredgecolor=edge,
                markeredgewidth=width, ecolor=color(method), elinewidth=1.0, zorder=3,
                label=point.group.short_name,
            )  # fmt: skip
        _legend(one)
        one.set_title("better: up and to the right", loc="right", color=style.FAINT_INK,
                      fontsize=style.SMALL_POINTS)  # fmt: skip


def draw_curves(
    curves: Sequence[Curve], title: str, place: str, *,
    labels: tuple[str, str], y_limits: tuple[float, float],
    target: tuple[float, str] | None = None,
) -> Figure:  # fmt: skip
    """Draw curves with their spread, their names beside them, and a named target."""
    panels = by_schedule(curves)
    figure, axes = _panels(list(panels), title, place, names=_LABELS)
    for one, (schedule, drawn) in zip(axes, panels.items(), strict=True):
        one.set(xlabel=labels[0], ylabel=labels[1])
        one.grid(visible=True)
        marker = _MARKERS.get(schedule, _OTHER_MARKER)
        for curve in drawn:
            look: Any = {"color": color(curve.group.method)}
            # What is one point only would be no line at all.
            one.plot(curve.xs, curve.ys, linestyle=line_style(curve.group.method), linewidth=1.5,
                     marker=marker if len(curve.xs) == 1 else None,
                     label=curve.group.short_name, **look)  # fmt: skip
            if curve.lows != curve.highs:
                one.fill_between(curve.xs, curve.lows, curve.highs, alpha=0.12, linewidth=0, **look)
        if target is not None:
            one.axhline(target[0], color=style.INK, linewidth=0.8, linestyle=":")
            at, box = (0.01, target[0]), {"color": "white", "alpha": 0.8, "pad": 0.5}
            style.annotate(one, target[1], at, ("axes fraction", "data"), shift=(0, 2),
                           color=style.INK, bbox=box)  # fmt: skip
        one.set(xlim=one.get_xlim(), ylim=y_limits)
        _legend(one)
    return figure


def draw_stages(found: Sequence[StageRatios], title: str, place: str) -> Figure:
    """Draw freeze ratios as a table of colours: a line per method, a column per stage."""
    panels = by_schedule(found)
    tallest = max(len(rows) for rows in panels.values())
    names = [wrap(one.group.short_name) for one in found]
    longest = max(len(line) for name in names for line in name.split("\n"))
    row_height = 0.14 * max(name.count("\n") + 1 for name in names) + 0.12
    figure, axes = _panels(list(panels), title, place, inner_height=row_height * tallest,
                           left=0.075 * longest + 0.3)  # fmt: skip
    for one, of_one in zip(axes, panels.values(), strict=True):
        n_stages = 1 + max(stage for row in of_one for stage in row.ratios)
        points = style.SMALL_POINTS if n_stages > 8 else style.TEXT_POINTS - 1
        cells = [(i, stage, r) for i, row in enumerate(of_one) for stage, r in row.ratios.items()]
        for i, stage, ratio in cells:
            one.add_patch(Rectangle((stage - 0.48, i - 0.46), 0.96, 0.92, facecolor=_RATIOS(ratio),
                                    edgecolor=style.GRID, linewidth=0.5))  # fmt: skip
            if n_stages <= 16:
                one.text(stage, i, f"{ratio:.2f}", ha="center", va="center", fontsize=points,
                         color="white" if ratio > 0.7 else style.INK)  # fmt: skip
        one.set(xlim=(-0.5, n_stages - 0.5), ylim=(tallest - 0.5, -0.5), xlabel="stage")
        names = [wrap(row.group.short_name) for row in of_one]
        one.set_yticks(range(len(of_one)), names, fontsize=style.SMALL_POINTS + 1)
        one.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
        one.tick_params(length=0)
        one.spines[["left", "bottom"]].set_visible(False)
    return figure


def draw_batches(batches: Sequence[Example[Timeline]], title: str, place: str) -> Figure:
    """Draw a schedule's batches by method below each other, on a common time axis."""
    names = [_batch_name(batch) for batch in batches]
    return timeline_figure([batch.value for batch in batches], f"{title}\n{place}", names)


def _batch_name(batch: Example[Timeline]) -> str:
    run, how = batch.run, f"{batch.value.origin} {batch.value.words}"
    if freezes(batch.group.method):
        return f"{batch.group.short_name}, seed {run.seed}, {how}"
    return f"{batch.group.short_name}, {how} by {run.method}, seed {run.seed}"


def draw_counts(
    examples: Sequence[Example[Sequence[FrozenCount]]], title: str, place: str
) -> Figure:
    """Draw freeze counts of tensors for a schedule's methods, a panel per method."""
    names = [f"{wrap(one.group.short_name)}\nseed {one.run.seed}, rank {one.value[0].rank}"
             for one in examples]  # fmt: skip
    return frequencies_figure(names, [one.value for one in examples], f"{title}\n{place}")


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Return limits with room for names around ``values``."""
    low, high = min(values), max(values)
    room = 0.18 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def _panels(
    titles: Sequence[str], title: str, place: str, *,
    inner_height: float = 2.6, left: float = 0.75, names: float = 0.0,
) -> tuple[Figure, list[Axes]]:  # fmt: skip
    """Return a figure with axes per name, two in a row, "" for an empty place; sizes are inches."""
    n_columns = min(2, len(titles))
    n_rows = -(-len(titles) // n_columns)
    width = style.WIDTH_INCHES if n_columns == 2 else _NARROW
    height = _HEAD + n_rows * (_TOP + inner_height + _BOTTOM)
    figure = Figure(figsize=(width, height))
    figure.text(0.02, 1 - 0.25 / height, title, fontsize=style.TITLE_POINTS + 2, weight="bold",
                color=style.INK, va="center")  # fmt: skip
    figure.text(0.02, 1 - 0.52 / height, place, fontsize=style.TEXT_POINTS, va="center",
                color=style.FAINT_INK)  # fmt: skip
    panel = width / n_columns
    inner_width = panel - left - _RIGHT - names
    axes = []
    for i, name in enumerate(titles):
        if not name:
            continue
        row, column = divmod(i, n_columns)
        top = height - _HEAD - row * (_TOP + inner_height + _BOTTOM) - _TOP
        x, y = (column * panel + left) / width, (top - inner_height) / height
        axes.append(figure.add_axes((x, y, inner_width / width, inner_height / height)))
        axes[-1].set_title(name, loc="left", color=style.INK)
    return figure, axes


_WRAP_AT = 24


def wrap(text: str) -> str:
    """Return ``text`` with a line per part, if long."""
    return text.replace(", ", ",\n") if len(text) > _WRAP_AT else text


def _legend(axes: Axes) -> None:
    """Add a legend right of ``axes``, without repeated names."""
    handles, names = axes.get_legend_handles_labels()
    known = dict(zip(map(wrap, names), handles, strict=True))
    axes.legend(known.values(), known, loc="center left", bbox_to_anchor=(1.0, 0.5),
                fontsize=style.SMALL_POINTS)  # fmt: skip
