"""The plots of a comparison: what many runs show, as plots of matplotlib.

A plot holds the runs of one place, that is devices and model, with a panel for each schedule:
nothing shares axes that could not be compared. A plot whose data no run has says so, and has no
figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from matplotlib import rc_context
from matplotlib.figure import Figure

from timelyfreeze.compare.curves import Curve, Point, curves, points, stage_ratios, training_losses
from timelyfreeze.compare.drawing import Panels, by_schedule, draw_curves, draw_points, draw_stages
from timelyfreeze.compare.groups import NO_PLACE, Group
from timelyfreeze.compare.metrics import Terms
from timelyfreeze.compare.peers import freezes
from timelyfreeze.plots import style
from timelyfreeze.records import last_running_mean

T = TypeVar("T")
_TRADE_OFF = (
    "Better is up and to the right. Points are means over repeats, bars reach from the smallest to "
    "the largest{error}; the broad grey line joins what nothing else beats in both."
)
# Title and caption by kind.
_WORDS = {
    "accuracy_throughput": (
        "Accuracy against throughput",
        _TRADE_OFF.format(error=", and at least one standard error of the questions"),
    ),
    "loss_throughput": ("Validation loss against throughput", _TRADE_OFF.format(error="")),
    "loss_seconds": (
        "Loss against seconds of training",
        "Lines: running mean over {window} logged training losses, mean over repeats, with a band "
        "from the smallest to the largest. Small points: validation losses. What lies above the "
        "axes is of the first fifth of the training; losses that are no numbers are left out. "
        "Seconds are those spent in training steps; of an emulated pipeline, by its virtual clock.",
    ),
    "freeze_ratio_steps": (
        "Freeze ratio over steps",
        "Fraction of the elements of all weights whose update was left out, step by step, mean "
        "over repeats with a band from the smallest to the largest.",
    ),
    "freeze_ratio_stages": (
        "Freeze ratio of each stage",
        "As applied in the last step, mean over repeats: fraction of the elements whose update was "
        "left out.",
    ),
}
KINDS = tuple(_WORDS)


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
    for number, name in enumerate(places, 1):
        place = _Place(name, number, [one for one in groups if one.place == name], terms)
        yield from (draw(place) for draw in (_accuracy, _validation, _losses, _ratios, _stages))


@dataclass(frozen=True)
class _Place:
    """The runs of a place, and what their plots have in common."""

    name: str
    number: int
    groups: Sequence[Group]
    terms: Terms

    @property
    def freezing(self) -> list[Group]:
        return [group for group in self.groups if freezes(group.method)]

    def plot(
        self,
        kind: str,
        found: Sequence[tuple[Group, T, str]],
        draw: Callable[[Panels[T], str, str], Figure],
        missing: tuple[str, ...],
    ) -> Plot:
        """Return a plot of what was ``found``: groups, what is drawn of them, the same in words."""
        title, caption = _WORDS[kind]
        caption = caption.format(window=self.terms.window)
        told = "; ".join(f"{group.schedule} {group.name}{words}" for group, _, words in found)
        panels = by_schedule([(group, one) for group, one, _ in found])
        # Names are no formulas, whatever signs they have.
        with style.house_style(), rc_context({"text.parse_math": False}):
            figure = draw(panels, title, self.name) if found else None
        alt = f"{title}. {told}."
        return Plot(kind, self.number, title, self.name, caption, alt, figure, missing)


def _accuracy(place: _Place) -> Plot:
    asked = {run.scores.asked for g in place.groups for run in g.runs if run.scores}
    found = _trade_off(place, "accuracy", "accuracy_stderr") if len(asked) <= 1 else []
    missing = _without(place.groups, found, "an average accuracy")
    if len(asked) > 1:
        missing = ("the runs were asked different questions",)
    draw = partial(draw_points, y_label="average accuracy, %", low_is_good=False)
    return place.plot("accuracy_throughput", found, draw, missing)


def _validation(place: _Place) -> Plot:
    found = _trade_off(place, "validation_loss")
    missing = _without(place.groups, found, "a validation loss that is a number")
    draw = partial(draw_points, y_label="validation loss, low at the top", low_is_good=True)
    return place.plot("loss_throughput", found, draw, missing)


def _trade_off(
    place: _Place, key: str, error_key: str | None = None
) -> list[tuple[Group, Point, str]]:
    found = points(place.groups, key, error_key)
    return [(p.group, p, f": {p.x.mean:,.0f} tokens/s, {p.y.mean:.3f}") for p in found]


def _losses(place: _Place) -> Plot:
    window, reference = place.terms.window, place.terms.reference
    drawn = [c for group in place.groups for c in curves(group, training_losses(window))]
    marks = [c for g in place.groups for c in curves(g, lambda run: run.validation_losses)]
    target = None
    if reference and reference.summary.model == place.groups[0].runs[0].summary.model:
        loss = last_running_mean(reference.losses, window)
        target = None if loss is None else (loss, f"where {reference.label} ends")
    draw = partial(
        draw_curves,
        labels=("seconds of training", "loss"),
        y_limits=_limits(drawn, target),
        marks=by_schedule([(c.group, c) for c in marks]),
        target=target,
    )
    found = [(c.group, c, f" ends at {c.ys[-1]:.3f} after {c.xs[-1]:,.0f} s") for c in drawn]
    missing = _without(place.groups, found, f"{window} logged losses")
    return place.plot("loss_seconds", found, draw, missing)


def _ratios(place: _Place) -> Plot:
    drawn = [c for group in place.freezing for c in curves(group, lambda run: run.freeze_ratios)]
    found = [(c.group, c, f" ends at {c.ys[-1]:.2f}") for c in drawn]
    missing = _without(place.freezing, found, "freeze ratios by step (steps.csv)")
    draw = partial(draw_curves, labels=("step", "freeze ratio"), y_limits=(-0.02, 1.02))
    return place.plot("freeze_ratio_steps", found, draw, missing)


def _stages(place: _Place) -> Plot:
    known = [(group, ratios) for group in place.freezing if (ratios := stage_ratios(group))]
    found = [
        (group, (group, ratios), ": " + ", ".join(f"stage {i} {r:.2f}" for i, r in ratios.items()))
        for group, ratios in known
    ]
    missing = _without(place.freezing, found, "freeze ratios by stage")
    return place.plot("freeze_ratio_stages", found, draw_stages, missing)


def _without(
    groups: Sequence[Group], found: Sequence[tuple[Group, Any, str]], what: str
) -> tuple[str, ...]:
    """Return a sentence that names the groups that lack ``what`` is drawn."""
    if not found:
        return (f"no run has {what}",)
    drawn = [group for group, *_ in found]
    names = [f"{g.schedule} {g.name}" for g in groups if g not in drawn and g.runs]
    return (f"without {what}: {', '.join(names)}",) if names else ()


def _limits(drawn: Sequence[Curve], target: tuple[float, str] | None) -> tuple[float, float]:
    """Return limits of losses: of the last four fifths of each curve, where curves part."""
    late = [y for c in drawn for ys in (c.lows, c.highs) for y in ys[len(ys) // 5 :]]
    late += [] if target is None else [target[0]]
    values = [y for y in late if math.isfinite(y)] or [0.0]
    room = 0.05 * (max(values) - min(values)) or 0.05
    return min(values) - room, max(values) + room
