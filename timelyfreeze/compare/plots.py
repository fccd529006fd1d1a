"""The plots of a comparison: what many runs show, as plots of matplotlib.

A plot holds the runs of one place, that is devices and model, with a panel for each schedule, or
those of one schedule: nothing shares axes that could not be compared. A plot whose data no run has
says so, and has no figure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from matplotlib.figure import Figure

from timelyfreeze.compare.curves import (
    Curve,
    Example,
    Examples,
    Point,
    batches,
    curves,
    frozen_counts,
    points,
    same_work,
    stage_ratios,
    training_losses,
)
from timelyfreeze.compare.drawing import (
    Panels,
    by_schedule,
    draw_batches,
    draw_counts,
    draw_curves,
    draw_models,
    draw_points,
    draw_stages,
)
from timelyfreeze.compare.groups import NO_PLACE, Group
from timelyfreeze.compare.metrics import Terms
from timelyfreeze.compare.plot import (
    ACCURACY,
    HISTOGRAM,
    LOSSES,
    MODELS,
    RATIOS,
    STAGES,
    TIMELINES,
    TOP1,
    VALIDATION,
    Found,
    Place,
    Plot,
    without,
)
from timelyfreeze.compare.runs import Points, Run
from timelyfreeze.compare.runs.peers import split_peer
from timelyfreeze.plots.response import mean_frequency
from timelyfreeze.records import FrozenCount, Timeline, last_running_mean

T = TypeVar("T")
_ACCURACY_LABEL = "average accuracy, %"


def plots(groups: Sequence[Group], terms: Terms) -> Iterator[Plot]:
    """Yield all plots, place by place; those that have no data as well."""
    names = dict.fromkeys(one.place for one in groups if one.place != NO_PLACE)
    places = [Place(name, [g for g in groups if g.place == name], terms) for name in names]
    numbers: Counter[str] = Counter()
    for plot in _plots(places):
        numbers[plot.kind] += 1
        yield replace(plot, number=numbers[plot.kind])


def _plots(places: Sequence[Place]) -> Iterator[Plot]:
    for place in places:
        learned = (_losses, _top1) if place.groups[0].unit == "images" else (_losses,)
        yield from (draw(place) for draw in (_accuracy, _validation, *learned, _ratios, _stages))
        yield from _histograms(place)
        yield from _timelines(place)
    if len({place.model for place in places}) > 1:
        yield _models(places)


def _accuracy(place: Place) -> Plot:
    found, missing = _accuracies(place)
    draw = partial(draw_points, y_label=_ACCURACY_LABEL, low_is_good=False)
    return place.plot(ACCURACY, found, draw, missing)


def _accuracies(place: Place) -> tuple[Found[Point], tuple[str, ...]]:
    """Return accuracies and speeds in a place, and what is missing."""
    asked = {run.scores.asked for g in place.groups for run in g.runs if run.scores}
    if len(asked) > 1:
        return [], ("the runs were asked different questions",)
    found = _trade_off(place, "accuracy", "accuracy_stderr")
    return found, without(place.groups, found, "an average accuracy")


def _models(places: Sequence[Place]) -> Plot:
    """Return the accuracies of several models, one place after the other."""
    known = [(place, found) for place in places if (found := _accuracies(place)[0])]
    models = Counter(place.model for place, _ in known)
    several = len(models) > 1
    panels = {
        place.model if models[place.model] == 1 else place.name:
            by_schedule([(group, point) for group, point, _ in found])
        for place, found in known
    }  # fmt: skip

    def draw(_: Panels[Point], title: str, where: str) -> Figure:
        return draw_models(panels, title, where, y_label=_ACCURACY_LABEL, low_is_good=False)

    everywhere = Place("; ".join(dict.fromkeys(p.devices for p in places)), [], places[0].terms)
    found = [
        (group, point, f"{words} ({place.model})")
        for place, of_place in known for group, point, words in of_place
    ]  # fmt: skip
    missing = () if several else ("fewer than two models have an average accuracy",)
    return everywhere.plot(MODELS, found if several else [], draw, missing)


def _validation(place: Place) -> Plot:
    found = _trade_off(place, "validation_loss")
    missing = without(place.groups, found, "a validation loss that is a number")
    draw = partial(draw_points, y_label="validation loss, low at the top", low_is_good=True)
    return place.plot(VALIDATION, found, draw, missing)


def _trade_off(place: Place, key: str, error_key: str | None = None) -> Found[Point]:
    found = points(place.groups, key, error_key)
    return [(p.group, p, f": {p.x.mean:,.0f} {p.group.unit}/s, {p.y.mean:.3f}") for p in found]


def _losses(place: Place) -> Plot:
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
    missing = without(place.groups, found, f"{window} logged losses")
    return place.plot(LOSSES, found, draw, missing)


def _top1(place: Place) -> Plot:
    # A peer's learning rate is that of a shorter run, so what it has on the way says little.
    drawn = [
        c
        for group in place.groups
        for c in curves(group, partial(_top1_of, ends=split_peer(group.method) is not None))
    ]
    found = [(c.group, c, f" ends at {c.ys[-1]:.2f}% after {c.xs[-1]:,.0f} s") for c in drawn]
    missing = without(place.groups, found, "validations on pictures (accuracies.csv)")
    draw = partial(
        draw_curves, labels=("seconds of training", "top-1, %"), y_limits=_limits(drawn, None)
    )
    return place.plot(TOP1, found, draw, missing)


def _top1_of(run: Run, *, ends: bool) -> Points:
    return run.top1[-1:] if ends else run.top1


def _ratios(place: Place) -> Plot:
    drawn = [c for group in place.freezing for c in curves(group, lambda run: run.freeze_ratios)]
    found = [(c.group, c, f" ends at {c.ys[-1]:.2f}") for c in drawn]
    missing = without(place.freezing, found, "freeze ratios by step (steps.csv)")
    draw = partial(draw_curves, labels=("step", "freeze ratio"), y_limits=(-0.02, 1.02))
    return place.plot(RATIOS, found, draw, missing)


def _stages(place: Place) -> Plot:
    known = [(group, ratios) for group in place.freezing if (ratios := stage_ratios(group))]
    found = [
        (group, (group, ratios), ": " + ", ".join(f"stage {i} {r:.2f}" for i, r in ratios.items()))
        for group, ratios in known
    ]
    missing = without(place.freezing, found, "freeze ratios by stage")
    return place.plot(STAGES, found, draw_stages, missing)


def _histograms(place: Place) -> Iterator[Plot]:
    groups = place.freezing
    looked = [frozen_counts(of_one) for of_one in by_schedule([(g, g) for g in groups]).values()]

    def tell(counts: Sequence[FrozenCount]) -> str:
        mean = f"{mean_frequency(counts):.0%} of backwards"
        return f": {len(counts)} tensors of rank {counts[0].rank}, left out of {mean}"

    what = "counts of frozen tensors (frozen_counts.csv)"
    return _of_schedules(place, HISTOGRAM, looked, draw_counts, tell, (groups, what))


def _timelines(place: Place) -> Iterator[Plot]:
    groups = [group for group in place.groups if not split_peer(group.method)]
    by_one = by_schedule([(group, group) for group in groups]).values()
    looked = [batches(part) for of_one in by_one for part in same_work(of_one)]

    def tell(batch: Timeline) -> str:
        return f": {batch.origin} {batch.words}, {batch.batch_ms:.4g} ms"

    what = "a batch, measured or planned"
    return _of_schedules(place, TIMELINES, looked, draw_batches, tell, (groups, what))


def _of_schedules(
    place: Place,
    kind: str,
    looked: Sequence[Examples[T]],
    draw: Callable[[Panels[Example[T]], str, str], Figure],
    tell: Callable[[T], str],
    wanted: tuple[Sequence[Group], str],
) -> Iterator[Plot]:
    """Yield a plot of each of ``looked`` that has examples; if none has, one without a figure.

    What is missing of all schedules stands beside the first. ``wanted`` is whose examples were
    looked for, and what they are.
    """
    parts = [[(one.group, one, tell(one.value)) for one in found.known] for found in looked]
    groups, what = wanted
    missing = without(groups, [one for part in parts for one in part], what)
    missing += tuple(reason for found in looked for reason in found.unread)
    for i, part in enumerate([part for part in parts if part] or [[]]):
        schedule = part[0][0].schedule if part else ""
        yield place.plot(kind, part, draw, () if i else missing, schedule)


def _limits(drawn: Sequence[Curve], target: tuple[float, str] | None) -> tuple[float, float]:
    """Return limits of what lies in the last four fifths of each curve, where curves part."""
    late = [
        y
        for c in drawn
        for x, *ys in zip(c.xs, c.lows, c.highs, strict=True)
        for y in ys
        if x >= c.xs[-1] / 5
    ]
    late += [] if target is None else [target[0]]
    return _with_room([y for y in late if math.isfinite(y)])


def _with_room(heights: Sequence[float]) -> tuple[float, float]:
    values = heights or [0.0]
    room = 0.05 * (max(values) - min(values)) or 0.05
    return min(values) - room, max(values) + room
