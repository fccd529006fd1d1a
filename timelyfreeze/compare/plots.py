"""The plots of a comparison: what many runs show, as figures of matplotlib.

A plot holds the runs of one place, that is devices and model, with a panel for each schedule:
nothing shares axes that could not be compared. A plot whose data no run has says so, and has no
figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from matplotlib.figure import Figure

from timelyfreeze.compare.curves import (
    Curve,
    curves,
    freeze_ratios,
    stage_ratios,
    training_losses,
    validation_losses,
)
from timelyfreeze.compare.drawing import draw_curves, draw_points, draw_stages
from timelyfreeze.compare.groups import NO_PLACE, Group
from timelyfreeze.compare.metrics import Terms
from timelyfreeze.compare.tradeoffs import Point, points
from timelyfreeze.records import last_running_mean

T = TypeVar("T")
KINDS = (
    "accuracy_throughput", "loss_throughput", "loss_seconds", "freeze_ratio_steps",
    "freeze_ratio_stages",
)  # fmt: skip


@dataclass(frozen=True)
class Plot:
    """One plot, or why there is none.

    Attributes:
        kind: One of ``KINDS``.
        number: Of its place, from 1.
        title: What it shows.
        place: Of the runs in it.
        caption: How to read it.
        alt: What it says, for those who do not see it.
        figure: None if no run has the data.
        missing: What is not in it, and why; a sentence each.
    """

    kind: str
    number: int
    title: str
    place: str
    caption: str
    alt: str
    figure: Figure | None
    missing: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of its files, without ending."""
        return self.kind if self.number == 1 else f"{self.kind}_{self.number}"


def plots(groups: Sequence[Group], terms: Terms) -> Iterator[Plot]:
    """Yield all plots, place by place; those that have no data as well."""
    places = dict.fromkeys(one.place for one in groups if one.place != NO_PLACE)
    for number, place in enumerate(places, 1):
        mine = [one for one in groups if one.place == place]
        for draw in (_accuracy, _validation, _losses, _ratios, _stages):
            yield draw(mine, place, number, terms)


def _accuracy(groups: Sequence[Group], place: str, number: int, terms: Terms) -> Plot:
    asked = {one.run.scores.asked for g in groups for one in g.finished if one.run.scores}
    found = points(groups, "accuracy", "accuracy_stderr") if len(asked) == 1 else []
    missing = _without(groups, [p.group for p in found], "an average accuracy")
    if len(asked) > 1:
        missing = ("the runs were asked different questions",)
    return _trade_off(
        found,
        kind="accuracy_throughput",
        number=number,
        title="Accuracy against throughput",
        place=place,
        y_label="average accuracy, %",
        low_is_good=False,
        error=True,
        missing=missing,
    )


def _validation(groups: Sequence[Group], place: str, number: int, terms: Terms) -> Plot:
    found = points(groups, "validation_loss")
    return _trade_off(
        found,
        kind="loss_throughput",
        number=number,
        title="Validation loss against throughput",
        place=place,
        y_label="validation loss, low at the top",
        low_is_good=True,
        missing=_without(groups, [p.group for p in found], "a validation loss that is a number"),
    )


def _trade_off(
    found: Sequence[Point],
    *,
    kind: str,
    number: int,
    title: str,
    place: str,
    y_label: str,
    low_is_good: bool,
    missing: tuple[str, ...],
    error: bool = False,
) -> Plot:
    panels = _by_schedule(found, lambda point: point.group)
    told = [
        f"{p.group.schedule} {p.group.name}: {p.x.mean:,.0f} tokens/s, {p.y.mean:.3f}"
        for p in found
    ]
    return Plot(
        kind=kind,
        number=number,
        title=title,
        place=place,
        caption="Better is up and to the right. Points are means over repeats, bars reach from the "
        "smallest to the largest"
        + (", and at least one standard error of the questions" if error else "")
        + "; the broad grey line joins what nothing else beats in both.",
        alt=f"{title}. {'; '.join(told)}.",
        figure=draw_points(
            panels,
            title=title,
            place=place,
            x_label="tokens/s per device",
            y_label=y_label,
            low_is_good=low_is_good,
        )
        if found
        else None,
        missing=missing,
    )


def _losses(groups: Sequence[Group], place: str, number: int, terms: Terms) -> Plot:
    drawn = [c for group in groups for c in curves(group, training_losses(terms.window))]
    marks = [c for group in groups for c in curves(group, validation_losses)]
    reference, target = terms.reference, None
    if reference is not None and _model_of(groups) == reference.summary.get("model"):
        loss = last_running_mean(reference.losses, terms.window)
        target = None if loss is None else (loss, f"where {reference.label} ends")
    title = "Loss against seconds of training"
    told = [
        f"{c.group.schedule} {c.group.name} ends at {c.ys[-1]:.3f} after {c.xs[-1]:,.0f} s"
        for c in drawn
    ]
    return Plot(
        kind="loss_seconds",
        number=number,
        title=title,
        place=place,
        caption=f"Lines: running mean over {terms.window} logged training losses, mean over "
        "repeats, with a band from the smallest to the largest. Small points: validation losses. "
        "What lies above the axes is of the first fifth of the training; losses that are no "
        "numbers are left out. "
        "Seconds are those spent in training steps; of an emulated pipeline, by the process that "
        "emulates it.",
        alt=f"{title}. {'; '.join(told)}.",
        figure=draw_curves(
            _by_schedule(drawn, lambda curve: curve.group),
            title=title,
            place=place,
            x_label="seconds of training",
            y_label="loss",
            marks=_by_schedule(marks, lambda curve: curve.group),
            target=target,
            y_limits=_limits(drawn, target),
        )
        if drawn
        else None,
        missing=_without(groups, [c.group for c in drawn], f"{terms.window} logged losses"),
    )


def _ratios(groups: Sequence[Group], place: str, number: int, terms: Terms) -> Plot:
    freezing = [group for group in groups if group.method != "none"]
    drawn = [c for group in freezing for c in curves(group, freeze_ratios)]
    title = "Freeze ratio over steps"
    told = [f"{c.group.schedule} {c.group.name} ends at {c.ys[-1]:.2f}" for c in drawn]
    return Plot(
        kind="freeze_ratio_steps",
        number=number,
        title=title,
        place=place,
        caption="Fraction of the elements of all weights whose update was left out, step by step, "
        "mean over repeats with a band from the smallest to the largest.",
        alt=f"{title}. {'; '.join(told)}.",
        figure=draw_curves(
            _by_schedule(drawn, lambda curve: curve.group),
            title=title,
            place=place,
            x_label="step",
            y_label="freeze ratio",
            marks={},
            y_limits=(-0.02, 1.02),
        )
        if drawn
        else None,
        missing=_without(freezing, [c.group for c in drawn], "freeze ratios by step (steps.csv)"),
    )


def _stages(groups: Sequence[Group], place: str, number: int, terms: Terms) -> Plot:
    freezing = [group for group in groups if group.method != "none"]
    known = [(group, ratios) for group in freezing if (ratios := stage_ratios(group))]
    title = "Freeze ratio of each stage"
    told = [
        f"{group.schedule} {group.name}: "
        + ", ".join(f"stage {stage} {ratio:.2f}" for stage, ratio in ratios.items())
        for group, ratios in known
    ]
    return Plot(
        kind="freeze_ratio_stages",
        number=number,
        title=title,
        place=place,
        caption="As applied in the last step, mean over repeats: fraction of the elements whose "
        "update was left out.",
        alt=f"{title}. {'; '.join(told)}.",
        figure=draw_stages(_by_schedule(known, lambda pair: pair[0]), title=title, place=place)
        if known
        else None,
        missing=_without(freezing, [group for group, _ in known], "freeze ratios by stage"),
    )


def _by_schedule(found: Sequence[T], group_of: Callable[[T], Group]) -> dict[str, list[T]]:
    """Return what was ``found`` by schedule, in the order of the table."""
    panels: dict[str, list[T]] = {}
    for one in found:
        panels.setdefault(group_of(one).schedule, []).append(one)
    return panels


def _without(groups: Sequence[Group], drawn: Sequence[Group], what: str) -> tuple[str, ...]:
    """Return a sentence that names the groups that lack ``what`` is drawn."""
    if not drawn:
        return (f"no run has {what}",)
    names = [f"{g.schedule} {g.name}" for g in groups if g not in drawn and g.finished]
    return (f"without {what}: {', '.join(names)}",) if names else ()


def _limits(drawn: Sequence[Curve], target: tuple[float, str] | None) -> tuple[float, float]:
    """Return limits of losses: of the last four fifths of each curve, where curves part."""
    late = [y for c in drawn for ys in (c.lows, c.highs) for y in ys[len(ys) // 5 :]]
    late += [] if target is None else [target[0]]
    values = [y for y in late if math.isfinite(y)] or [0.0]
    room = 0.05 * (max(values) - min(values)) or 0.05
    return min(values) - room, max(values) + room


def _model_of(groups: Sequence[Group]) -> str | None:
    """Return the model of groups of one place."""
    return groups[0].members[0].run.summary.get("model")
