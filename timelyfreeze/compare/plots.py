"""The plots of a comparison, by matplotlib.

A plot holds the runs of a place (devices and model), with a panel per schedule, or a schedule's
alone, so that axes hold comparable values. A plot without data has a sentence and no figure.
"""

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
from timelyfreeze.compare.curves import Curve, Example, Examples, OfGroup, Point
from timelyfreeze.compare.drawing import by_schedule
from timelyfreeze.compare.groups import Group
from timelyfreeze.compare.metrics import Criteria
from timelyfreeze.compare.runs.run import NO_PLACE, Points, Run
from timelyfreeze.compare.runs.variants import freezes, split_peer
from timelyfreeze.plots import style
from timelyfreeze.records.tables import last_running_mean

T = TypeVar("T")
Drawn = TypeVar("Drawn", bound=OfGroup)
Draw = Callable[[Sequence[Drawn], str, str], Figure]
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
    """A plot, or the reason why there is none."""

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
    """The runs of a place (devices and model), with the common part of their plots."""

    name: str
    groups: Sequence[Group]
    criteria: Criteria

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
        found: Sequence[Drawn],
        draw: Draw[Drawn],
        groups: Sequence[Group] | None = None,
        missing: tuple[str, ...] | None = None,
        schedule: str = "",
    ) -> Plot:
        """Return a plot of ``found``, of a single ``schedule`` if given.

        ``missing`` defaults to the ``groups`` without anything found.
        """
        often = {"better": _TOLD["better"], "seconds": _TOLD["seconds"]}
        told = {key: text.format(window=self.criteria.window, **often)
                for key, text in _TOLD["kinds"][kind].items()}  # fmt: skip
        title = told["title"]
        if missing is None:
            missing = self.lacking(kind, found, groups)
        where = f"{schedule}, {self.name}" if schedule else self.name
        drawn = "; ".join(f"{one.schedule} {one.group.name}{one.words}" for one in found)
        # Names are no formulas, whatever signs they have.
        with style.house_style(), rc_context({"text.parse_math": False}):
            figure = draw(found, title, where) if found else None
        return Plot(kind, title, where, told["caption"], f"{title}. {drawn}.", figure, missing)

    def lacking(
        self, kind: str, found: Sequence[OfGroup], groups: Sequence[Group] | None = None
    ) -> tuple[str, ...]:
        """Return a sentence naming the groups without data; by default all of ``groups``."""
        data = _TOLD["kinds"][kind]["data"].format(window=self.criteria.window)
        if not found:
            return (f"no run has {data}",)
        drawn = [one.group for one in found]
        groups = self.groups if groups is None else groups
        names = [f"{g.schedule} {g.name}" for g in groups if g not in drawn and g.runs]
        return (f"without {data}: {', '.join(names)}",) if names else ()


def plots(groups: Sequence[Group], criteria: Criteria) -> Iterator[Plot]:
    """Yield all plots, place by place, also without data."""
    names = dict.fromkeys(one.place for one in groups if one.place != NO_PLACE)
    places = [_Place(name, [g for g in groups if g.place == name], criteria) for name in names]
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
        yield place.plot(VALIDATION, shown.points(place.groups, "validation_loss"), draw)
        yield _losses(place)
        yield _held_out(place)
        if place.groups[0].unit == "images":
            yield _curves(
                place, TOP1, place.groups, _validated(lambda run: run.top1),
                "{y:.2f}% after {x:,.0f} s", labels=("seconds of training", "top-1, %"),
            )  # fmt: skip
        yield _curves(
            place, RATIOS, place.freezing, lambda run: run.freeze_ratios, "{y:.2f}",
            labels=("step", "freeze ratio"), y_limits=(-0.02, 1.02),
        )  # fmt: skip
        ratios = shown.stage_ratios(place.freezing)
        yield place.plot(STAGES, ratios, drawing.draw_stages, place.freezing)
        of_one = by_schedule(place.freezing).values()
        looked = [shown.last_ranks(groups) for groups in of_one]
        yield from _of_schedules(place, HISTOGRAM, looked, drawing.draw_counts, place.freezing)
        groups = [group for group in place.groups if not split_peer(group.method)]
        of_one = by_schedule(groups).values()
        batches = [shown.batches(part) for alike in of_one for part in shown.same_work(alike)]
        yield from _of_schedules(place, TIMELINES, batches, drawing.draw_batches, groups)
    if len({place.model for place in places}) > 1:
        yield _models(places)


def _accuracies(place: _Place) -> tuple[list[Point], tuple[str, ...] | None]:
    """Return accuracies and speeds in a place, and why there are none if questions differ."""
    asked = {run.scores.asked for g in place.groups for run in g.runs if run.scores}
    if len(asked) > 1:
        return [], ("the runs were asked different questions",)
    return shown.points(place.groups, "accuracy", "accuracy_stderr"), None


def _models(places: Sequence[_Place]) -> Plot:
    """Return the accuracies of several models, place after place."""
    known = [(place, found) for place in places if (found := _accuracies(place)[0])]
    models = Counter(place.model for place, _ in known)
    points = {
        place.model if models[place.model] == 1 else place.name: found for place, found in known
    }
    everywhere = _Place("; ".join(dict.fromkeys(p.devices for p in places)), [], places[0].criteria)
    if len(models) < 2:
        missing = ("fewer than two models have an average accuracy",)
        return everywhere.plot(MODELS, [], _ACCURACIES, missing=missing)
    told = [replace(p, words=f"{p.words} ({place.model})") for place, found in known for p in found]
    return everywhere.plot(MODELS, told, partial(_ACCURACIES, models=points))


def _curves(
    place: _Place, kind: str, groups: Sequence[Group], points: Callable[[Run], Points], ends: str,
    **drawn_as: Any,
) -> Plot:  # fmt: skip
    """Return a plot of curves; ``ends`` is how they end in words."""
    drawn = shown.curves(groups, points, ends)
    drawn_as.setdefault("y_limits", _limits(drawn, drawn_as.get("target")))
    return place.plot(kind, drawn, partial(drawing.draw_curves, **drawn_as), groups)


def _losses(place: _Place) -> Plot:
    window = place.criteria.window
    target = _end(place, lambda run: last_running_mean(run.losses, window))
    labels = "seconds of training", "training loss"
    points = shown.training_losses(window)
    return _curves(place, LOSSES, place.groups, points, _LOSS_AT_END, labels=labels, target=target)


def _held_out(place: _Place) -> Plot:
    target = _end(place, lambda run: run.summary.validation_loss)
    labels = "seconds of training", "held-out loss"
    points = _validated(lambda run: run.validation_losses)
    return _curves(
        place, HELD_OUT, place.groups, points, _LOSS_AT_END, labels=labels, target=target
    )


def _end(place: _Place, loss_of: Callable[[Run], float | None]) -> tuple[float, str] | None:
    """Return the final loss of the baseline run, if any here."""
    run = place.criteria.reference
    loss = None if run is None or run.summary.model != place.model else loss_of(run)
    return None if run is None or loss is None else (loss, f"where {run.label} ends")


def _validated(points_of: Callable[[Run], Points]) -> Callable[[Run], Points]:
    """Return a function from a run to its validations; for peers the last alone.

    A peer's learning rate follows a shorter run, so earlier values say little.
    """
    return lambda run: points_of(run)[-1:] if split_peer(run.method) else points_of(run)


def _of_schedules(
    place: _Place, kind: str, looked: Sequence[Examples[T]], draw: Draw[Example[T]],
    groups: Sequence[Group],
) -> Iterator[Plot]:  # fmt: skip
    """Yield a plot per schedule with examples; if there are none, a plot without a figure.

    The missing ``groups`` stand beside the first.
    """
    missing = place.lacking(kind, [one for known, _ in looked for one in known], groups)
    missing += tuple(reason for _, unread in looked for reason in unread)
    for i, known in enumerate([known for known, _ in looked if known] or [[]]):
        schedule = known[0].schedule if known else ""
        yield place.plot(kind, known, draw, missing=() if i else missing, schedule=schedule)


def _limits(drawn: Sequence[Curve], target: tuple[float, str] | None) -> tuple[float, float]:
    """Return limits around the last four fifths of all curves, where curves part."""
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
