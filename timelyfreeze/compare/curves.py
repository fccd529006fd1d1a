"""Curves over time, and points of speed against quality, of repeats of a run."""

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
    """A group of repeats, as shown."""

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
    """Return a mean curve with its spread per group, or several where repeats do not fit together.

    Labels end in ``ends``. Repeats fit together if they have as many points; points of an index are
    averaged in place and value, since a step's time varies. Values that are no number, such as
    diverged losses, are left out.
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
    """Return a function from a run to means over ``window`` logged losses, by training seconds."""

    def points(run: Run) -> Points:
        means = running_means([loss for _, loss in run.losses], window)
        ends = [seconds for seconds, _ in run.losses[window - 1 :]]
        return list(zip(ends, means, strict=bool(means)))

    return points


@dataclass(frozen=True)
class StageRatios(OfGroup):
    """Freeze ratios by stage in the last step, averaged over the runs with data."""

    ratios: Mapping[int, float]


def stage_ratios(groups: Sequence[Group]) -> list[StageRatios]:
    """Return the stage ratios of all groups with data."""
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
    """Tokens per second of a device, and the metric beside them."""

    x: Spread
    y: Spread


def points(groups: Sequence[Group], key: str, error_key: str | None = None) -> list[Point]:
    """Return the points of ``groups`` with a throughput and the metric ``key``.

    Spreads are no smaller than the standard error of single runs, the metric ``error_key``.
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
    """Return the points beaten by no other in both metrics, by falling throughput."""
    sign = -1.0 if low_is_good else 1.0
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.x.mean, -sign * p.y.mean)):
        if not best or sign * point.y.mean > sign * best[-1].y.mean:
            best.append(point)
    return best


T = TypeVar("T")


@dataclass(frozen=True)
class Example(OfGroup, Generic[T]):
    """An example from a run, shown for its group; for ``none`` from a freezing run."""

    run: Run
    value: T


Examples = tuple[list[Example[T]], list[str]]


def batches(groups: Sequence[Group]) -> Examples[Timeline]:
    """Return a batch per group, a measured before a predicted.

    Runs of ``none`` measure no batch. Theirs is taken from a freezing run before it froze, with the
    same seed if possible, and the nearest batch time without freezing. Peers are not among the
    groups.
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
    """Return frozen counts of tensors on each group's last rank, once freezing had begun."""

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
    """Return each group's first readable example, and the unreadable."""
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
    """Return ``groups`` in parts with equal work per step, as far as known."""
    parts: list[list[Group]] = []
    for group in groups:
        for part in parts:
            if not work_differs(part[0].runs[0].settings, group.runs[0].settings):
                part.append(group)
                break
        else:
            parts.append([group])
    return parts
