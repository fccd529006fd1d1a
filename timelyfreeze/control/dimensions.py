"""In how many directions frozen weights should learn, told before anything frozen is timed."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from torch import nn
from torch.distributed.fsdp import FSDPModule

from timelyfreeze.planning import factor_of_means
from timelyfreeze.runtime import Exchange, FreezingStage
from timelyfreeze.runtime.linear import is_compiled_in_place, plain_linears
from timelyfreeze.runtime.low_rank import Subspaces
from timelyfreeze.settings import AUTO, FreezeSettings, auto_rank
from timelyfreeze.timing import Energies

logger = logging.getLogger(__name__)

# A weight gradient is a third of a layer's multiplications, F = dX = dW, and a plan leaves about
# half of them out (0.4 to 0.6 in runs).
_OF_WEIGHTS, _RATIO = 1.0 / 3.0, 0.5
# The estimate makes too little of what few directions lose: with SmolLM2 over an epoch dimensions
# 16, 32 and 64 took 1.12, 1.09 and 1.02 times the steps, and 1.02, 1.02, 1.01 were estimated. So
# the highest dimension is taken that comes so near to the best.
_NEAR = 1.02


class _Learned(NamedTuple):
    """What learns in a process's stages, embeddings aside."""

    widths: Counter[int]  # of inputs of linear layers that a subspace may belong to
    of_layers: int  # numbers in those
    of_all: int


def with_rank(
    settings: FreezeSettings, stages: Sequence[FreezingStage], exchange: Exchange
) -> FreezeSettings:
    """Return settings with the value of "auto"; every process must call this together.

    The width is that of most linear layers. Where they have less than half of the weights, as in
    mixtures of experts and with Conv1D, subspaces would leave little to freeze.
    """
    if settings.gradient_rank != AUTO:
        return settings
    everyone = exchange.all_gather([tuple(_learned(stage)) for stage in stages])
    found = [_Learned(*each) for process in everyone for each in process]
    widths = sum((each.widths for each in found), Counter[int]())
    share = sum(each.of_layers for each in found) / max(sum(each.of_all for each in found), 1)
    width = max(widths, key=lambda width: (widths[width], -width), default=0)
    rank = auto_rank(width if share >= 0.5 else 0, settings.last_warmup_step)
    logger.info(
        "gradient_rank is %s: linear layers are %d wide, and have %.0f%% of the weights that learn",
        rank,
        width,
        100.0 * share,
    )
    return replace(settings, gradient_rank=rank)


def _learned(stage: FreezingStage) -> _Learned:
    module = stage.submod
    embeddings = {part.weight for part in module.modules() if isinstance(part, nn.Embedding)}
    learned = [p for p in module.parameters() if p.requires_grad and p not in embeddings]
    # FSDP splits weights once; another split is one of tensor parallelism.
    splits = int(any(isinstance(part, FSDPModule) for part in module.modules()))
    layers = [] if is_compiled_in_place(module) else plain_linears(module)
    weights = {
        layer.weight: layer.in_features
        for layer in layers
        if layer.weight.requires_grad
        and sum(not p.is_replicate() for p in getattr(layer.weight, "placements", ())) <= splits
    }
    sizes = sum(weight.numel() for weight in weights), sum(p.numel() for p in learned)
    return _Learned(Counter(weights.values()), *sizes)


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
