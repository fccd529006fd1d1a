"""Backward time against freeze ratio, and how far it is from the straight line that a plan assumes.

As in Figure 15 of arXiv:2602.05754: a plan takes a backward to be
w(r) = w_max - r (w_max - w_min), a line through what was measured with nothing and with everything
frozen. Here the points in between are measured too.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from timelyfreeze.schedule import ActionKind


@dataclass(frozen=True)
class Spread:
    """Several measurements of one thing, milliseconds.

    Attributes:
        median_ms: The middle one.
        quartiles_ms: A quarter lies below the first, a quarter above the second.
        n: How many there are.
    """

    median_ms: float
    quartiles_ms: tuple[float, float]
    n: int


def spread(times_ms: Sequence[float]) -> Spread:
    """Sum up measurements, of which there must be one or more."""
    low, middle, high = np.quantile(np.array(times_ms), [0.25, 0.5, 0.75]).tolist()
    return Spread(middle, (low, high), len(times_ms))


@dataclass(frozen=True)
class Point:
    """Backwards that were frozen at one ratio.

    Attributes:
        ratio: The ratio that masks were drawn with.
        fractions: Fraction of elements that each mask froze.
        times_ms: How long each backward took, milliseconds.
    """

    ratio: float
    fractions: tuple[float, ...]
    times_ms: tuple[float, ...]

    @property
    def fraction(self) -> float:
        """Mean fraction of elements that was frozen."""
        return statistics.fmean(self.fractions)


@dataclass(frozen=True)
class Line:
    """How well backward time is a straight line in the freeze ratio.

    Attributes:
        unfrozen_ms: Measured median with nothing frozen.
        frozen_ms: Measured median with everything frozen.
        largest_miss_ms: Of the points in between, the measured median that is farthest from the
            line through these two, minus what the line says. 0 if there are none.
        largest_miss: The same as a fraction of ``unfrozen_ms``.
        fit_unfrozen_ms: Least-squares line through all medians, at ratio 0.
        fit_frozen_ms: The same at ratio 1.
        fit_residual_ms: The largest distance of a median from it.
        r_squared: Fraction of the medians' variance that it explains; 1 if there is none.
    """

    unfrozen_ms: float
    frozen_ms: float
    largest_miss_ms: float
    largest_miss: float
    fit_unfrozen_ms: float
    fit_frozen_ms: float
    fit_residual_ms: float
    r_squared: float


def fit_line(points: Sequence[Point]) -> Line:
    """Compare a response with the line that a plan assumes, and with the best line.

    Args:
        points: With ratios 0 and 1 among them.

    Raises:
        ValueError: If one of these is missing.
    """
    by_ratio = {point.ratio: statistics.median(point.times_ms) for point in points}
    if 0.0 not in by_ratio or 1.0 not in by_ratio:
        raise ValueError(
            f"the ratios {sorted(by_ratio)} do not tell the line; it needs 0 and 1 among them"
        )
    unfrozen_ms, frozen_ms = by_ratio[0.0], by_ratio[1.0]
    fractions = np.array([point.fraction for point in points])
    medians_ms = np.array([statistics.median(point.times_ms) for point in points])
    misses_ms = medians_ms - (unfrozen_ms - fractions * (unfrozen_ms - frozen_ms))
    between = np.array([0.0 < point.ratio < 1.0 for point in points])
    miss_ms = 0.0
    if between.any():
        miss_ms = float(max(misses_ms[between].tolist(), key=abs))
    design = np.stack([np.ones_like(fractions), fractions], axis=1)
    (start_ms, slope_ms), *_ = np.linalg.lstsq(design, medians_ms, rcond=None)
    residuals_ms = medians_ms - (start_ms + slope_ms * fractions)
    variance = float(((medians_ms - medians_ms.mean()) ** 2).sum())
    return Line(
        unfrozen_ms=unfrozen_ms,
        frozen_ms=frozen_ms,
        largest_miss_ms=miss_ms,
        largest_miss=miss_ms / unfrozen_ms if unfrozen_ms > 0.0 else 0.0,
        fit_unfrozen_ms=float(start_ms),
        fit_frozen_ms=float(start_ms + slope_ms),
        fit_residual_ms=float(np.abs(residuals_ms).max()),
        r_squared=1.0 - float((residuals_ms**2).sum()) / variance if variance > 0.0 else 1.0,
    )


@dataclass(frozen=True)
class Response:
    """What was measured of one stage under one way of freezing it.

    Attributes:
        stage: The stage; None for one that was made only to measure what a layer takes.
        n_layers: How many layers it has.
        first_stage: For the first stage, which of ``settings.FIRST_STAGE_MODES`` it ran under.
        forward_ms: Times of F, over all batches.
        input_ms: Times of I, over all batches with a split backward.
        curves: Backward times by ratio: of B, and of W where split backwards were measured.
    """

    stage: int | None
    n_layers: int
    first_stage: str | None
    forward_ms: tuple[float, ...]
    input_ms: tuple[float, ...]
    curves: dict[ActionKind, tuple[Point, ...]]

    def ends(self, kind: ActionKind) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the times of ``kind`` with everything and with nothing frozen."""
        by_ratio = {point.ratio: point.times_ms for point in self.curves[kind]}
        return by_ratio[1.0], by_ratio[0.0]
