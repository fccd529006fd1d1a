"""What a run learned over steps and time: its losses, when one was reached, and accuracies."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from timelyfreeze.files import AnyFloat, Count, Fraction, Seconds, Table

# Logged losses that a running mean is taken over.
WINDOW = 5


@dataclass(frozen=True)
class LossRow:
    """A logged loss.

    Attributes:
        step: Optimizer step after which it was taken.
        seconds: Sum of the step times until then.
        train_loss: None in a row of a validation.
        validation_loss: None in a row of a training step.
    """

    step: Count
    seconds: Seconds
    train_loss: AnyFloat | None
    validation_loss: AnyFloat | None


@dataclass(frozen=True)
class AccuracyRow:
    """A validation of an image classifier.

    Attributes:
        step: Optimizer step after which it was made.
        seconds: Sum of the step times until then.
        top1: Fraction of the pictures whose class had the highest score.
        top5: Fraction of those whose class was among the five highest.
    """

    step: Count
    seconds: Seconds
    top1: Fraction
    top5: Fraction


LOSSES = Table("losses.csv", LossRow)
ACCURACIES = Table("accuracies.csv", AccuracyRow)


def running_means(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each ``window`` consecutive values; empty if there are fewer."""
    return [_mean(values[i : i + window]) for i in range(len(values) - window + 1)]


def last_running_mean(curve: Sequence[tuple[float, float]], window: int) -> float | None:
    """Return the mean of the last ``window`` losses of a curve of (seconds, loss).

    None if there are fewer, or it is not finite.
    """
    means = running_means([loss for _, loss in curve], window)
    return means[-1] if means and math.isfinite(means[-1]) else None


def seconds_to_reach(
    curve: Sequence[tuple[float, float]], target: float, window: int
) -> float | None:
    """Return when the running mean of a curve of (seconds, loss) comes down to ``target``.

    That is at the last loss of the first ``window`` whose mean is not above it; else None.
    """
    means = running_means([loss for _, loss in curve], window)
    ends = [seconds for seconds, _ in curve[window - 1 :]]
    return next((s for s, mean in zip(ends, means, strict=True) if mean <= target), None)


def _mean(values: Sequence[float]) -> float:
    """Return the mean; NaN where the sum is beyond numbers, or infinities of both signs meet."""
    try:
        return statistics.fmean(values)
    except (OverflowError, ValueError):
        return math.nan
