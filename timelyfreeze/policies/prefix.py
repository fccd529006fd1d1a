"""Frozen prefixes: common parts of methods freezing from the front.

Notation: L layers (transformer blocks). Arrays have a number per layer, from front to back, or per
live layer.
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
    """Norms of the L blocks, from their tensors' sums of squares, shape [n]."""
    return np.sqrt(layout.layer_sums(square_sums))


def relative_change(
    change: NDArray[np.float64], before: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Divide a change, shape [m], by the former values, not negative.

    For a former value of 0: 0 without a change, else ``LARGEST_CHANGE`` of any sign, since a tensor
    that only begins to move is not stable.
    """
    ratios = np.where(change == 0.0, 0.0, LARGEST_CHANGE)
    return np.divide(change, before, out=ratios, where=before != 0.0)


def leading_run(flags: NDArray[np.bool_]) -> int:
    """Count the flags set before the first unset."""
    unset = np.flatnonzero(~flags)
    return int(unset[0]) if unset.size else len(flags)


def grow(length: float, n_layers: int, rate: float, wanted: int) -> float:
    """Let a prefix grow to ``wanted``, but by no more than a fraction of the live layers.

    The common bound of Eq. 1 of PipeTransformer and Eq. 4 of SmartPipe. The length is a real
    number: cut to whole layers at every check, the prefix would stop for good once ``rate`` times
    the live layers is below 1. Lengths are in layers, in [0, L], and never become less; ``rate`` is
    in (0, 1], and ``wanted`` comes from the method's measure.
    """
    bound = length + rate * (n_layers - length)
    return min(bound, max(float(wanted), length))


def whole_layers(length: float, n_layers: int) -> int:
    """Return the number of frozen layers for a length of :func:`grow`: L - 1 at most."""
    return min(math.floor(length + _ROUNDING), n_layers - 1)
