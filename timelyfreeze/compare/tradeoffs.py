"""What is paid for speed: accuracy or loss of repeats against their throughput."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from timelyfreeze.compare.groups import Group, Spread

SPEED = "device_tokens_per_second"


@dataclass(frozen=True)
class Point:
    """One group of repeats.

    Attributes:
        group: Whose it is.
        x: Tokens per second of a device.
        y: What is set against it.
    """

    group: Group
    x: Spread
    y: Spread


def points(groups: Sequence[Group], key: str, error_key: str | None = None) -> list[Point]:
    """Return the points of those ``groups`` that have a throughput and the figure called ``key``.

    Args:
        groups: Repeats.
        key: Of the figure that is set against throughput.
        error_key: Of its standard error in a single run; the spread is no smaller than that.
    """
    found = []
    for group in groups:
        x, y = group.spread(SPEED), group.spread(key)
        # Of a run that diverged it is no number.
        if x is None or y is None or not math.isfinite(x.mean + y.mean):
            continue
        error = None if error_key is None else group.spread(error_key)
        if error is not None:
            low, high = y.mean - error.mean, y.mean + error.mean
            y = Spread(y.mean, min(y.low, low), max(y.high, high))
        found.append(Point(group, x, y))
    return found


def front(points: Sequence[Point], *, low_is_good: bool) -> list[Point]:
    """Return the points that no other beats in both figures, by falling throughput.

    Args:
        points: Some groups.
        low_is_good: Whether less of the second figure is better.
    """
    sign = -1.0 if low_is_good else 1.0
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.x.mean, -sign * p.y.mean)):
        if not best or sign * point.y.mean > sign * best[-1].y.mean:
            best.append(point)
    return best
