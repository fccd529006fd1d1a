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
# The estimate makes too little of what few directions lose: with SmolLM2 over an epoch ranks 16, 32
# and 64 took 1.12, 1.09 and 1.02 times the steps, and 1.02, 1.02, 1.01 were estimated. So the
# highest rank is taken that comes so near to the best.
_NEAR = 1.02


def choose_rank(subspaces: Subspaces, exchange: Exchange) -> None:
    """Keep the rank that promises most, if there is a choice; every process must call this."""
    if subspaces.rank != subspaces.ranks[-1] or len(subspaces.ranks) == 1:
        return  # chosen before, in a pipeline that is left
    everyone = exchange.all_gather((subspaces.measured, subspaces.shares))
    times = times_of_ranks(*zip(*everyone, strict=True))
    near = [rank for rank, time in times.items() if time <= _NEAR * min(times.values())]
    rank = max(near, default=subspaces.ranks[len(subspaces.ranks) // 2])
    subspaces.keep(rank)
    told = ", ".join(f"{time:.2f} with {each}" for each, time in times.items())
    logger.info(
        "Frozen weights learn in %d directions each (%s)",
        rank,
        f"first estimate of the time to a loss: {told}" if told else "gradients do not tell more",
    )


def times_of_ranks(
    energies: Sequence[Mapping[int, Energies]], shares: Sequence[tuple[float, float]]
) -> dict[int, float]:
    """Return {rank: estimated time to a loss over that without freezing}; none where unknown.

    ``energies`` are those of each process for each rank, ``shares`` what rank 1 multiplies for each
    token in its linear layers, and what exact products do.
    """
    of_rank_1, exact = np.sum(shares, axis=0)
    times = {}
    for rank in energies[0]:
        found = Energies.total(each[rank] for each in energies)
        mean = found.captured_mean
        if mean is None:
            return {}
        saved = _OF_WEIGHTS * _RATIO * (1.0 - min(rank * of_rank_1 / exact, 1.0))
        times[rank] = (1.0 - saved) * factor_of_means(np.array([_RATIO]), found.captured, mean)
    return times
