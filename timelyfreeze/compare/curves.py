"""What repeats of a run have in common: curves over time, and points of speed against quality."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from timelyfreeze.compare.groups import Group, Spread
from timelyfreeze.compare.runs.run import Points, Run
from timelyfreeze.compare.runs.variants import freezes, work_differs
from timelyfreeze.plots.gallery import measured_batch, predicted_batch
from timelyfreeze.records import COUNTS, FROZEN, UNFROZEN, FrozenCount, Timeline, running_means

SPEED = "device_tokens_per_second"


@dataclass(frozen=True)
class Curve:
    """Means of a group of repeats over seconds or steps, with the smallest and largest of them."""

    group: Group
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    lows: tuple[float, ...]
    highs: tuple[float, ...]


def curves(group: Group, points: Callable[[Run], Points]) -> list[Curve]:
    """Return the curves of ``group``: one with its spread, or several that do not fit together.

    Repeats fit together if they have as many points; the first points of all make one point, and so
    on, at the mean of their places: a step does not take equally long in all of them. What is no
    number, as the losses of a run that diverged, is left out.
    """
    numbers = [[(x, y) for x, y in points(run) if math.isfinite(y)] for run in group.runs]
    known = [found for found in numbers if found]
    if len({len(found) for found in known}) > 1:
        return [_mean(group, [found]) for found in known]
    return [_mean(group, known)] if known else []


def _mean(group: Group, found: Sequence[Points]) -> Curve:
    xs, ys = np.moveaxis(np.array(found), 2, 0)  # each [repeats, points]
    columns = (xs.mean(0), ys.mean(0), ys.min(0), ys.max(0))
    return Curve(group, *(tuple(column.tolist()) for column in columns))


def training_losses(window: int) -> Callable[[Run], Points]:
    """Return what gives running means over ``window`` logged losses, by seconds of training."""

    def points(run: Run) -> Points:
        means = running_means([loss for _, loss in run.losses], window)
        ends = [seconds for seconds, _ in run.losses[window - 1 :]]
        return list(zip(ends, means, strict=bool(means)))

    return points


def stage_ratios(group: Group) -> dict[int, float]:
    """Return the freeze ratio of each stage in the last step, mean over those that know it."""
    known = [run.summary.stage_ratios or {} for run in group.runs]
    return {
        stage: statistics.fmean(ratios[stage] for ratios in known if stage in ratios)
        for stage in sorted(set().union(*known))
    }


@dataclass(frozen=True)
class Point:
    """Tokens per second of a device in a group of repeats, and what is set against it."""

    group: Group
    x: Spread
    y: Spread


def points(groups: Sequence[Group], key: str, error_key: str | None = None) -> list[Point]:
    """Return the points of those ``groups`` that have a throughput and the metric called ``key``.

    The spread is no smaller than the standard error of single runs, the metric ``error_key``.
    """
    found = []
    for group in groups:
        x, y = group.spread(SPEED), group.spread(key)
        # Of a run that diverged it is no number.
        if x is None or y is None or not math.isfinite(x.mean + y.mean):
            continue
        error = group.spread(error_key) if error_key else None
        if error is not None:
            low, high = y.mean - error.mean, y.mean + error.mean
            y = Spread(y.mean, min(y.low, low), max(y.high, high))
        found.append(Point(group, x, y))
    return found


def front(points: Sequence[Point], *, low_is_good: bool) -> list[Point]:
    """Return the points that no other beats in both metrics, by falling throughput."""
    sign = -1.0 if low_is_good else 1.0
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.x.mean, -sign * p.y.mean)):
        if not best or sign * point.y.mean > sign * best[-1].y.mean:
            best.append(point)
    return best


T = TypeVar("T")


@dataclass(frozen=True)
class Example(Generic[T]):
    """What one run has, shown for its group; that of ``none`` is of a run that freezes."""

    group: Group
    run: Run
    value: T


Examples = tuple[list[Example[T]], list[str]]


def batches(groups: Sequence[Group]) -> Examples[Timeline]:
    """Return a batch of each group: a measured one if any of its runs has one, else a predicted.

    A run of ``none`` measures no batch. Its batch is one that a run which freezes measured before
    it did, with the same seed where there is such a run, and of these the one whose batches
    without freezing are nearest to those of none. Peers, which have none, are not among the groups.
    """
    freezing = [run for group in groups if freezes(group.method) for run in group.runs]

    def shown_by(group: Group) -> Sequence[Run]:
        if freezes(group.method):
            return group.runs
        seed, none_ms = group.runs[0].seed, group.runs[0].summary.batch_ms

        def distance(run: Run) -> tuple[bool, float]:
            own_ms = run.summary.batch_ms_unfrozen
            apart = math.inf if own_ms is None or none_ms is None else abs(own_ms - none_ms)
            return run.seed != seed, apart

        return sorted(freezing, key=distance)

    return first_examples([
        (group, run, partial(read, phases=FROZEN if freezes(group.method) else UNFROZEN))
        for group in groups
        for read in (measured_batch, predicted_batch)
        for run in shown_by(group)
    ])  # fmt: skip


def last_rank(run_folder: Path) -> Sequence[FrozenCount] | None:
    """Return what became of the tensors of the last rank, once freezing had begun."""
    if not (run_folder / COUNTS.name).exists():
        return None
    counts = [count for count in COUNTS.read(run_folder) if count.backwards]
    last = max((count.rank for count in counts), default=None)
    return [count for count in counts if count.rank == last] or None


def first_examples(
    candidates: Sequence[tuple[Group, Run, Callable[[Path], T | None]]],
) -> Examples[T]:
    """Return the first example of each group, and why others cannot be read.

    After the first none of the group is read any more.
    """
    known: dict[Group, Example[T]] = {}
    unread: dict[str, None] = {}
    for group, run, read in candidates:
        if group in known:
            continue
        try:
            value = read(run.folder)
        except (OSError, ValueError) as error:
            unread[f"what cannot be read of {run.label}: {error}"] = None
            continue
        if value is not None:
            known[group] = Example(group, run, value)
    return list(known.values()), list(unread)


def same_work(groups: Sequence[Group]) -> list[list[Group]]:
    """Return ``groups`` in parts whose steps have as much to do, as far as that is known."""
    parts: list[list[Group]] = []
    for group in groups:
        settings = group.runs[0].settings
        alike = [p for p in parts if not work_differs(p[0].runs[0].settings, settings)]
        if alike:
            alike[0].append(group)
        else:
            parts.append([group])
    return parts
