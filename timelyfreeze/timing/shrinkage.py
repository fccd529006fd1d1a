"""Noise in medians of alike actions, and estimates with less of it.

Every action of a pipeline gets its bounds from a few batches, so they carry noise. A plan is made
from differences between actions, and a solver that looks for the shortest batch finds those that
are noise as readily as those that are real: it freezes where a backward happened to look long, and
the batch comes out longer than planned. The microbatches of a stage do alike work, so what sets
their medians apart is noise unless it is larger than noise can be. Each median is therefore moved
towards the mean of its group, by as much as noise explains (the estimator of James and Stein,
positive part). Where microbatches really differ, medians stay where they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Standard deviation over median absolute deviation, and variance of a median over that of a mean,
# of normal noise.
_DEVIATION_OVER_MAD = 1.4826
_MEDIAN_OVER_MEAN = math.pi / 2.0
# With fewer medians around a mean, nothing is gained by moving them.
_FEWEST = 4


def less_noisy_medians(samples: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Return the median of each action of a group of alike ones, with less noise.

    The noise of a group is taken from how far samples lie from the median of their own action.

    Args:
        samples: Durations of each of k actions, at least one of each.

    Returns:
        NDArray[float64]: Shape [k]. The plain medians for fewer than 4 actions, for single samples,
        whose noise nobody knows, and for samples without noise; all of them the same where noise
        explains every difference.
    """
    medians = np.array([float(np.median(values)) for values in samples], dtype=np.float64)
    counts = np.array([len(values) for values in samples], dtype=np.float64)
    if len(medians) < _FEWEST or counts.min() < 2:
        return medians
    distances = np.concatenate(
        [
            np.abs(np.asarray(values, dtype=np.float64) - median) * math.sqrt(n / (n - 1.0))
            for values, median, n in zip(samples, medians, counts.tolist(), strict=True)
        ]
    )
    deviation = _DEVIATION_OVER_MAD * float(np.median(distances))
    noise = deviation**2 * _MEDIAN_OVER_MEAN / float(counts.mean())
    mean = float(medians.mean())
    spread = float(((medians - mean) ** 2).sum())
    if spread == 0.0:
        return medians
    kept = max(0.0, 1.0 - (len(medians) - 3) * noise / spread)
    return medians if kept == 1.0 else mean + kept * (medians - mean)
