"""What repeats of a run have in common over time: means and spreads of curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from timelyfreeze.compare.groups import Group
from timelyfreeze.compare.runs import Run
from timelyfreeze.records import running_means

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """A curve of one group of repeats.

    Attributes:
        group: Whose it is.
        xs: Seconds or steps, ascending.
        ys: Means over repeats.
        lows: Smallest of the repeats at each point.
        highs: Largest of the repeats at each point.
    """

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

    Args:
        group: Runs that repeat each other.
        points: Gives what is drawn of a run, nothing where it is not known.
    """
    of_runs = [points(one.run) for one in group.finished]
    numbers = [[(x, y) for x, y in found if math.isfinite(y)] for found in of_runs]
    known = [found for found in numbers if found]
    if len({len(found) for found in known}) > 1:
        return [_mean(group, [found]) for found in known]
    return [_mean(group, known)] if known else []


def training_losses(window: int) -> Callable[[Run], Points]:
    """Return what gives running means over ``window`` logged losses, by seconds of training."""

    def points(run: Run) -> Points:
        means = running_means([loss for _, loss in run.losses], window)
        ends = [seconds for seconds, _ in run.losses[window - 1 :]]
        return list(zip(ends, means, strict=bool(means)))

    return points


def validation_losses(run: Run) -> Points:
    """Return losses of validations, by seconds of training."""
    return run.validation_losses


def freeze_ratios(run: Run) -> Points:
    """Return freeze ratios, by step."""
    return run.freeze_ratios


def stage_ratios(group: Group) -> dict[int, float]:
    """Return the freeze ratio of each stage in the last step, mean over those that know it."""
    values: dict[int, list[float]] = {}
    for one in group.finished:
        for stage, ratio in (one.run.summary.get("stage_ratios") or {}).items():
            values.setdefault(int(stage), []).append(ratio)
    return {stage: statistics.fmean(values[stage]) for stage in sorted(values)}


def _mean(group: Group, found: Sequence[Points]) -> Curve:
    at = list(zip(*found, strict=True))
    ys = [[y for _, y in points] for points in at]
    return Curve(
        group=group,
        xs=tuple(statistics.fmean(x for x, _ in points) for points in at),
        ys=tuple(map(statistics.fmean, ys)),
        lows=tuple(map(min, ys)),
        highs=tuple(map(max, ys)),
    )
