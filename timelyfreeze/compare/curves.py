"""What repeats of a run have in common: curves over time, and points of speed against quality."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from timelyfreeze.compare.groups import Group, Spread
from timelyfreeze.compare.runs.run import Points, Run
from timelyfreeze.compare.runs.variants import freezes, work_differs
from timelyfreeze.plots.gallery import measured_batch, predicted_batch
from timelyfreeze.plots.response import mean_frequency
from timelyfreeze.records.tables import COUNTS, FrozenCount, running_means
from timelyfreeze.records.timeline import FROZEN, UNFROZEN, Timeline

SPEED = "device_tokens_per_second"


@dataclass(frozen=True)
class OfGroup:
    """What is shown of a group of repeats."""

    group: Group
    words: str  # the same, for those who do not see it

    @property
    def schedule(self) -> str:
        """Of the group."""
        return self.group.schedule


@dataclass(frozen=True)
class Curve(OfGroup):
    """Means over seconds or steps, with the smallest and largest of them."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]
    lows: tuple[float, ...]
    highs: tuple[float, ...]


def curves(groups: Sequence[Group], points: Callable[[Run], Points], ends: str = "") -> list[Curve]:
    """Return of each group one curve with its spread, or several that do not fit together.

    In words they end as ``ends`` says. Repeats fit together if they have as many points; the first
    points of all make one point, and so on, at the mean of their places: a step does not take
    equally long in all of them. What is no number, as losses of a run that diverged, is left out.
    """
    found = []
    for group in groups:
        numbers = [[(x, y) for x, y in points(run) if math.isfinite(y)] for run in group.runs]
        known = [of_run for of_run in numbers if of_run]
        is_one = len(set(map(len, known))) == 1
        for repeats in [known] if is_one else [[of_run] for of_run in known]:
            xs, ys = np.moveaxis(np.array(repeats), 2, 0)  # each [repeats, points]
            columns = (xs.mean(0), ys.mean(0), ys.min(0), ys.max(0))
            places, means, *ranges = (tuple(column.tolist()) for column in columns)
            words = " ends at " + ends.format(x=places[-1], y=means[-1])
            found.append(Curve(group, words, places, means, *ranges))
    return found


def training_losses(window: int) -> Callable[[Run], Points]:
    """Return what gives running means over ``window`` logged losses, by seconds of training."""

    def points(run: Run) -> Points:
        means = running_means([loss for _, loss in run.losses], window)
        ends = [seconds for seconds, _ in run.losses[window - 1 :]]
        return list(zip(ends, means, strict=bool(means)))

    return points


@dataclass(frozen=True)
class StageRatios(OfGroup):
    """The freeze ratio of each stage in the last step, mean over those that know it."""

    ratios: Mapping[int, float]


def stage_ratios(groups: Sequence[Group]) -> list[StageRatios]:
    """Return the ratios of those groups that have any."""
    found = []
    for group in groups:
        known = [run.summary.stage_ratios or {} for run in group.runs]
        if stages := sorted(set().union(*known)):
            ratios = {i: statistics.fmean(r[i] for r in known if i in r) for i in stages}
            words = ", ".join(f"stage {i} {ratio:.2f}" for i, ratio in ratios.items())
            found.append(StageRatios(group, f": {words}", ratios))
    return found


@dataclass(frozen=True)
class Point(OfGroup):
    """Tokens per second of a device, and what is set against it."""

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
        words = f": {x.mean:,.0f} {group.unit}/s, {y.mean:.3f}"
        found.append(Point(group, words, x, y))
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
class Example(OfGroup, Generic[T]):
    """What one run has, shown for its group; that of ``none`` is of a run that freezes."""

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

    candidates = [
        (group, run, partial(read, phases=FROZEN if freezes(group.method) else UNFROZEN))
        for group in groups
        for read in (measured_batch, predicted_batch)
        for run in shown_by(group)
    ]
    return _first(
        candidates, lambda batch: f"{batch.origin} {batch.words}, {batch.batch_ms:.4g} ms"
    )


def last_ranks(groups: Sequence[Group]) -> Examples[Sequence[FrozenCount]]:
    """Return what became of the tensors of each group's last rank, once freezing had begun."""

    def read(run_folder: Path) -> Sequence[FrozenCount] | None:
        if not (run_folder / COUNTS.name).exists():
            return None
        counts = [count for count in COUNTS.read(run_folder) if count.backwards]
        last = max((count.rank for count in counts), default=None)
        return [count for count in counts if count.rank == last] or None

    def tell(counts: Sequence[FrozenCount]) -> str:
        mean = f"{mean_frequency(counts):.0%} of backwards"
        return f"{len(counts)} tensors of rank {counts[0].rank}, left out of {mean}"

    return _first([(group, run, read) for group in groups for run in group.runs], tell)


def _first(
    candidates: Sequence[tuple[Group, Run, Callable[[Path], T | None]]], tell: Callable[[T], str]
) -> Examples[T]:
    """Return the first example of each group, after which none is read, and what cannot be."""
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
            known[group] = Example(group, f": {tell(value)}", run, value)
    return list(known.values()), list(unread)


def same_work(groups: Sequence[Group]) -> list[list[Group]]:
    """Return ``groups`` in parts whose steps have as much to do, as far as that is known."""
    parts: list[list[Group]] = []
    for group in groups:
        for part in parts:
            if not work_differs(part[0].runs[0].settings, group.runs[0].settings):
                part.append(group)
                break
        else:
            parts.append([group])
    return parts
