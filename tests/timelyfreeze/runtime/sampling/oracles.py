"""Everything a systematic draw can come to, with its probability, worked out in numpy."""

import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


def outcomes(probabilities: NDArray[np.float64]) -> Iterator[tuple[float, float]]:
    """Yield a random number from each interval in which the draw is the same, and its length.

    The draw changes only where a mark passes from one token to the next: at the fractional parts of
    the sums of probabilities.
    """
    borders = np.unique(np.concatenate([[0.0, 1.0], np.cumsum(probabilities) % 1.0]))
    for low, high in itertools.pairwise(borders):
        if high - low > 1e-12:
            yield 0.5 * (low + high), high - low


def joint_probabilities(probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how likely two tokens are kept together, shape [N, N]; on the diagonal one alone."""
    ends = np.cumsum(probabilities)
    joint = np.zeros((len(ends), len(ends)))
    for number, length in outcomes(probabilities):
        kept = np.floor(ends - number) > np.floor(ends - probabilities - number)
        joint += length * np.outer(kept, kept)
    return joint
