"""The plots of a comparison: what many runs show, as plots of matplotlib.

A plot holds the runs of one place, that is devices and model, with a panel for each schedule, or
those of one schedule: nothing shares axes that could not be compared. A plot whose data no run has
says so, and has no figure.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from typing import Any, TypeVar

from matplotlib import rc_context
from matplotlib.figure import Figure

from timelyfreeze.compare import curves as shown
from timelyfreeze.compare import drawing
from timelyfreeze.compare.curves import Curve, Example, Examples, Point
from timelyfreeze.compare.drawing import Panels, by_schedule
from timelyfreeze.compare.groups import Group
from timelyfreeze.compare.metrics import Terms
from timelyfreeze.compare.runs.run import NO_PLACE, Points, Run
from timelyfreeze.compare.runs.variants import freezes, split_peer
from timelyfreeze.plots import style
from timelyfreeze.plots.response import mean_frequency
from timelyfreeze.records import FrozenCount, Timeline, last_running_mean

T = TypeVar("T")
# A group, what is drawn of it, and the same in words.
Found = Sequence[tuple[Group, T, str]]
ACCURACY, MODELS, VALIDATION = "accuracy_throughput", "accuracy_models", "loss_throughput"
LOSSES, HELD_OUT, TOP1 = "loss_seconds", "held_out_loss_seconds", "top1_seconds"
RATIOS, STAGES = "freeze_ratio_steps", "freeze_ratio_stages"
HISTOGRAM, TIMELINES = "freeze_ratio_histogram", "timelines"
_TOLD: Mapping[str, Any] = tomllib.loads(
    resources.files(__package__).joinpath("plots.toml").read_text()
)
KINDS = tuple(_TOLD["kinds"])
_LOSS_AT_END = "{y:.3f} after {x:,.0f} s"
_ACCURACIES = partial(drawing.draw_points, y_label="average accuracy, %", low_is_good=False)


@dataclass(frozen=True)
class Plot:
    """One plot, or why there is none."""

    kind: str  # one of ``KINDS``
    title: str
    place: str  # of the runs in it, behind their schedule where it is of one alone
    caption: str  # how to read it
    alt: str  # what it says, for those who do not see it
    figure: Figure | None  # None if no run has the data
    missing: tuple[str, ...] = ()  # what is not in it, and why; a sentence each
    number: int = 1  # among the plots of its kind

    @property
    def name(self) -> str:
        """Of its files, without ending."""
        return self.kind if self.number == 1 else f"{self.kind}_{self.number}"


@dataclass(frozen=True)
class _Place:
    """The runs of a place, that is devices and model, and what their plots have in common."""

    name: str
    groups: Sequence[Group]
    terms: Terms

    @property
    def model(self) -> str:
        return self.groups[0].runs[0].summary.model

    @property
    def devices(self) -> str:
        return self.name.removesuffix(f", {self.model}")

    @property
    def freezing(self) -> list[Group]:
        return [group for group in self.groups if freezes(group.method)]

    def plot(
        self,
        kind: str,
        found: Found[T],
        draw: Callable[[Panels[T], str, str], Figure],
        groups: Sequence[Group] | None = None,
        missing: tuple[str, ...] | None = None,
        schedule: str = "",
    ) -> Plot:
        """Return a plot of what was ``found``, of one ``schedule`` if that is given.

        What is ``missing``, if that is not told, are those of ``groups`` of which nothing was.
        """
        often = {"better": _TOLD["better"], "seconds": _TOLD["seconds"]}
        told = {key: text.format(window=self.terms.window, **often)
                for key, text in _TOLD["kinds"][kind].items()}  # fmt: skip
        title = told["title"]
        if missing is None:
            missing = self.lacking(kind, found, groups)
        where = f"{schedule}, {self.name}" if schedule else self.name
        drawn = "; ".join(f"{group.schedule} {group.name}{words}" for group, _, words in found)
        panels = by_schedule([(group, one) for group, one, _ in found])
        # Names are no formulas, whatever signs they have.
        with style.house_style(), rc_context({"text.parse_math": False}):
            figure = draw(panels, title, where) if found else None
        return Plot(kind, title, where, told["caption"], f"{title}. {drawn}.", figure, missing)

    def lacking(
        self, kind: str, found: Found[Any], groups: Sequence[Group] | None = None
    ) -> tuple[str, ...]:
        """Return a sentence that names what lacks data of ``groups``, of all if not told."""
        data = _TOLD["kinds"][kind]["data"].format(window=self.terms.window)
        if not found:
            return (f"no run has {data}",)
        drawn = [group for group, *_ in found]
        groups = self.groups if groups is None else groups
        names = [f"{g.schedule} {g.name}" for g in groups if g not in drawn and g.runs]
        return (f"without {data}: {', '.join(names)}",) if names else ()


def plots(groups: Sequence[Group], terms: Terms) -> Iterator[Plot]:
    """Yield all plots, place by place; those that have no data as well."""
    names = dict.fromkeys(one.place for one in groups if one.place != NO_PLACE)
    places = [_Place(name, [g for g in groups if g.place == name], terms) for name in names]
    numbers: Counter[str] = Counter()
    for plot in _plots(places):
        numbers[plot.kind] += 1
        yield replace(plot, number=numbers[plot.kind])


def _plots(places: Sequence[_Place]) -> Iterator[Plot]:
    for place in places:
        found, differ = _accuracies(place)
        yield place.plot(ACCURACY, found, _ACCURACIES, missing=differ)
        label = "validation loss, low at the top"
        draw = partial(drawing.draw_points, y_label=label, low_is_good=True)
        yield place.plot(VALIDATION, _trade_off(place, "validation_loss"), draw)
        yield _losses(place)
        yield _held_out(place)
        if place.groups[0].unit == "images":
            yield _top1(place)
        drawn = [c for g in place.freezing for c in shown.curves(g, lambda run: run.freeze_ratios)]
        yield _curves(
            place, RATIOS, drawn, "{y:.2f}", groups=place.freezing,
            labels=("step", "freeze ratio"), y_limits=(-0.02, 1.02),
        )  # fmt: skip
        yield _stages(place)
        yield from _histograms(place)
        yield from _timelines(place)
    if len({place.model for place in places}) > 1:
        yield _models(places)


def _accuracies(place: _Place) -> tuple[Found[Point], tuple[str, ...] | None]:
    """Return accuracies and speeds in a place, and why there are none if questions differ."""
    asked = {run.scores.asked for g in place.groups for run in g.runs if run.scores}
    if len(asked) > 1:
        return [], ("the runs were asked different questions",)
    return _trade_off(place, "accuracy", "accuracy_stderr"), None


def _models(places: Sequence[_Place]) -> Plot:
    """Return the accuracies of several models, one place after the other."""
    known = [(place, found) for place in places if (found := _accuracies(place)[0])]
    models = Counter(place.model for place, _ in known)
    panels = {
        place.model if models[place.model] == 1 else place.name:
            by_schedule([(group, point) for group, point, _ in found])
        for place, found in known
    }  # fmt: skip
    everywhere = _Place("; ".join(dict.fromkeys(p.devices for p in places)), [], places[0].terms)
    if len(models) < 2:
        missing = ("fewer than two models have an average accuracy",)
        return everywhere.plot(MODELS, [], _ACCURACIES, missing=missing)
    found = [
        (group, point, f"{words} ({place.model})")
        for place, of_place in known for group, point, words in of_place
    ]  # fmt: skip
    return everywhere.plot(MODELS, found, partial(_ACCURACIES, models=panels))


def _trade_off(place: _Place, key: str, error_key: str | None = None) -> Found[Point]:
    found = shown.points(place.groups, key, error_key)
    return [(p.group, p, f": {p.x.mean:,.0f} {p.group.unit}/s, {p.y.mean:.3f}") for p in found]


def _curves(
    place: _Place, kind: str, drawn: Sequence[Curve], ends: str,
    groups: Sequence[Group] | None = None, **drawn_as: Any,
) -> Plot:  # fmt: skip
    """Return a plot of curves; ``ends`` is how they end in words."""
    found = [(c.group, c, " ends at " + ends.format(x=c.xs[-1], y=c.ys[-1])) for c in drawn]
    drawn_as.setdefault("y_limits", _limits(drawn, drawn_as.get("target")))
    return place.plot(kind, found, partial(drawing.draw_curves, **drawn_as), groups)


def _losses(place: _Place) -> Plot:
    window = place.terms.window
    drawn = [c for g in place.groups for c in shown.curves(g, shown.training_losses(window))]
    target = _end(place, lambda run: last_running_mean(run.losses, window))
    labels = "seconds of training", "training loss"
    return _curves(place, LOSSES, drawn, _LOSS_AT_END, labels=labels, target=target)


def _held_out(place: _Place) -> Plot:
    drawn = _validated(place, lambda run: run.validation_losses)
    target = _end(place, lambda run: run.summary.validation_loss)
    labels = "seconds of training", "held-out loss"
    return _curves(place, HELD_OUT, drawn, _LOSS_AT_END, labels=labels, target=target)


def _end(place: _Place, loss_of: Callable[[Run], float | None]) -> tuple[float, str] | None:
    """Return the loss at the end of the run that others are held against, if it has one here."""
    run = place.terms.reference
    loss = None if run is None or run.summary.model != place.model else loss_of(run)
    return None if run is None or loss is None else (loss, f"where {run.label} ends")


def _top1(place: _Place) -> Plot:
    drawn = _validated(place, lambda run: run.top1)
    labels = "seconds of training", "top-1, %"
    return _curves(place, TOP1, drawn, "{y:.2f}% after {x:,.0f} s", labels=labels)


def _validated(place: _Place, points_of: Callable[[Run], Points]) -> list[Curve]:
    """Return curves of what validations found; of peers the end alone.

    A peer's learning rate is that of a shorter run, so what it has on the way says little.
    """

    def points(run: Run) -> Points:
        return points_of(run)[-1:] if split_peer(run.method) else points_of(run)

    return [curve for group in place.groups for curve in shown.curves(group, points)]


def _stages(place: _Place) -> Plot:
    known = [(group, ratios) for group in place.freezing if (ratios := shown.stage_ratios(group))]
    found = [
        (group, (group, ratios), ": " + ", ".join(f"stage {i} {r:.2f}" for i, r in ratios.items()))
        for group, ratios in known
    ]
    return place.plot(STAGES, found, drawing.draw_stages, place.freezing)


def _histograms(place: _Place) -> Iterator[Plot]:
    def tell(counts: Sequence[FrozenCount]) -> str:
        mean = f"{mean_frequency(counts):.0%} of backwards"
        return f": {len(counts)} tensors of rank {counts[0].rank}, left out of {mean}"

    candidates = [(group, run, shown.last_rank) for group in place.freezing for run in group.runs]
    looked = [
        shown.first_examples(of_one)
        for of_one in by_schedule([(one[0], one) for one in candidates]).values()
    ]
    return _of_schedules(place, HISTOGRAM, looked, drawing.draw_counts, tell, place.freezing)


def _timelines(place: _Place) -> Iterator[Plot]:
    groups = [group for group in place.groups if not split_peer(group.method)]
    by_one = by_schedule([(group, group) for group in groups]).values()
    looked = [shown.batches(part) for of_one in by_one for part in shown.same_work(of_one)]

    def tell(batch: Timeline) -> str:
        return f": {batch.origin} {batch.words}, {batch.batch_ms:.4g} ms"

    return _of_schedules(place, TIMELINES, looked, drawing.draw_batches, tell, groups)


def _of_schedules(
    place: _Place,
    kind: str,
    looked: Sequence[Examples[T]],
    draw: Callable[[Panels[Example[T]], str, str], Figure],
    tell: Callable[[T], str],
    groups: Sequence[Group],
) -> Iterator[Plot]:
    """Yield a plot of each of ``looked`` that has examples; if none has, one without a figure.

    What is missing of ``groups`` stands beside the first.
    """
    parts = [[(one.group, one, tell(one.value)) for one in known] for known, _ in looked]
    missing = place.lacking(kind, [one for part in parts for one in part], groups)
    missing += tuple(reason for _, unread in looked for reason in unread)
    for i, part in enumerate([part for part in parts if part] or [[]]):
        schedule = part[0][0].schedule if part else ""
        yield place.plot(kind, part, draw, missing=() if i else missing, schedule=schedule)


def _limits(drawn: Sequence[Curve], target: tuple[float, str] | None) -> tuple[float, float]:
    """Return limits of what lies in the last four fifths of each curve, where curves part."""
    late = [
        y
        for c in drawn
        for x, *ys in zip(c.xs, c.lows, c.highs, strict=True)
        for y in ys
        if x >= c.xs[-1] / 5 and math.isfinite(y)
    ]
    late += [target[0]] if target is not None and math.isfinite(target[0]) else []
    low, high = min(late, default=0.0), max(late, default=0.0)
    room = 0.05 * (high - low) or 0.05
    return low - room, high + room
