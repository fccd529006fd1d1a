"""In how many directions frozen weights should learn, told before anything frozen is timed."""

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from timelyfreeze.planning import factor_of_means
from timelyfreeze.runtime import Exchange
from timelyfreeze.runtime.low_rank import Subspaces
from timelyfreeze.timing import Energies

logger = logging.getLogger(__name__)

# A weight gradient is a third of a layer's multiplications, F = dX = dW, and a plan leaves about
# half of them out (0.4 to 0.6 in runs).
_OF_WEIGHTS, _RATIO = 1.0 / 3.0, 0.5
# The estimate makes too little of what few directions lose: with SmolLM2 over an epoch dimensions
# 16, 32 and 64 took 1.12, 1.09 and 1.02 times the steps, and 1.02, 1.02, 1.01 were estimated. So
# the highest dimension is taken that comes so near to the best.
_NEAR = 1.02


def choose_dimension(subspaces: Subspaces, exchange: Exchange) -> None:
    """Keep the dimension that promises most, if there is a choice; every process must call this."""
    if subspaces.dimension != subspaces.dimensions[-1] or len(subspaces.dimensions) == 1:
        return  # chosen before, in a pipeline that is left
    everyone = exchange.all_gather((subspaces.measured, subspaces.shares))
    times = times_of_dimensions(*zip(*everyone, strict=True))
    near = [dimension for dimension, time in times.items() if time <= _NEAR * min(times.values())]
    dimension = max(near, default=subspaces.dimensions[len(subspaces.dimensions) // 2])
    subspaces.keep(dimension)
    told = ", ".join(f"{time:.2f} with {each}" for each, time in times.items())
    logger.info(
        "Frozen weights learn in %d directions each (%s)",
        dimension,
        f"first estimate of the time to a loss: {told}" if told else "gradients do not tell more",
    )


def times_of_dimensions(
    energies: Sequence[Mapping[int, Energies]], shares: Sequence[tuple[float, float]]
) -> dict[int, float]:
    """Return {dimension: estimated time to a loss over that without freezing}; none where unknown.

    ``energies`` are of each process for each dimension, ``shares`` the multiplications of a
    direction for each token in its linear layers, and of exact products.
    """
    of_direction, exact = np.sum(shares, axis=0)
    times = {}
    for dimension in energies[0]:
        found = Energies.total(each[dimension] for each in energies)
        mean = found.captured_mean
        if mean is None:
            return {}
        saved = _OF_WEIGHTS * _RATIO * (1.0 - min(dimension * of_direction / exact, 1.0))
        times[dimension] = (1.0 - saved) * factor_of_means(np.array([_RATIO]), found.captured, mean)
    return times
