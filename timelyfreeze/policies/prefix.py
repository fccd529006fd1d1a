"""Frozen prefixes: what methods that freeze a model from the front have in common.

Notation: L layers (transformer blocks). Arrays have one number for each, from front to back, or
for each that is still live.
"""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from timelyfreeze.policies.layout import ModelLayout

# Stands for a change from nothing to something. Not infinite: a percentile is interpolated, and
# infinity times 0 is not a number.
LARGEST_CHANGE = float(np.finfo(np.float64).max)

# A length that misses a whole number by rounding only (0.29 of 100 layers) counts as whole.
_ROUNDING = 1e-9


def layer_norms(layout: ModelLayout, square_sums: ArrayLike) -> NDArray[np.float64]:
    """Norm of each of the L blocks as one vector, from its tensors' sums of squares, shape [n]."""
    return np.sqrt(layout.layer_sums(square_sums))


def relative_change(
    change: NDArray[np.float64], before: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Divide a change, shape [m], by what was there before, which is not negative.

    Where there was nothing before, it is 0 if there is no change, else ``LARGEST_CHANGE``, whatever
    the sign: what has only begun to move is not stable.
    """
    ratios = np.where(change == 0.0, 0.0, LARGEST_CHANGE)
    return np.divide(change, before, out=ratios, where=before != 0.0)


def leading_run(flags: NDArray[np.bool_]) -> int:
    """Count the flags that are set before the first that is not."""
    unset = np.flatnonzero(~flags)
    return int(unset[0]) if unset.size else len(flags)


def grow(length: float, n_layers: int, rate: float, wanted: int) -> float:
    """Let a prefix grow to what is wanted, but by no more than a fraction of the live layers.

    The bound that Eq. 1 of PipeTransformer and Eq. 4 of SmartPipe have in common. The length is
    kept as a real number: if it were cut to whole layers at every check, the prefix would stop for
    good once ``rate`` times the live layers is below 1. Lengths are in layers, in [0, L], and never
    become less; ``rate`` is in (0, 1], and ``wanted`` what the measure of the method would freeze.
    """
    bound = length + rate * (n_layers - length)
    return min(bound, max(float(wanted), length))


def whole_layers(length: float, n_layers: int) -> int:
    """Return how many layers a length from :func:`grow` freezes: L - 1 at most, one stays live."""
    return min(math.floor(length + _ROUNDING), n_layers - 1)
