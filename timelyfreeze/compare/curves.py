"""What repeats of a run have in common: curves over time, and points of speed against quality."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from timelyfreeze.compare.groups import Group, Spread
from timelyfreeze.compare.runs import Points, Run
from timelyfreeze.records import running_means

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
    known = [run.summary.stage_ratios for run in group.runs if run.summary.stage_ratios]
    means = pd.DataFrame(known).mean().sort_index()
    return {int(stage): float(ratio) for stage, ratio in means.items()}


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
