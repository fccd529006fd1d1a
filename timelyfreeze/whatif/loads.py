"""Loads of ranks by time, by parameters and by memory: what a split can make even.

Whole numbers: nanoseconds, parameters, bytes. Of a rank with several stages the sum of their times
or parameters counts, and of memory what the rank holds at its fullest.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from timelyfreeze.files import Count
from timelyfreeze.schedule import PipelineDag, ScheduleOrder
from timelyfreeze.whatif.grid import Split
from timelyfreeze.whatif.layer_model import BlockTimes, LayerModel
from timelyfreeze.whatif.partition import Load, Span, greedy_split, min_max_split, stages_of_ranks
from timelyfreeze.whatif.rank_memory import BlockBytes, ModelBytes, parts_of, rank_memory
from timelyfreeze.whatif.times import Links, StageTimes, unfrozen_batch_ms

TIME, PARAMETERS, MEMORY = "time", "parameters", "memory"
PARTITIONS = (TIME, PARAMETERS, MEMORY)

_NS_PER_MS = 1e6


@dataclass(frozen=True)
class PartParameters:
    """Numbers of parameters."""

    first: Count  # the embedding
    layers: tuple[Count, ...]  # each layer
    last: Count  # the last norm and the head

    @property
    def are_alike(self) -> bool:
        """Whether all layers have as many."""
        return len(set(self.layers)) == 1

    @property
    def units(self) -> list[int]:
        """Parameters of each layer; embedding and head count with the first and the last."""
        units = list(self.layers)
        units[0] += self.first
        units[-1] += self.last
        return units


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of the parts of a model; None where they cannot be told."""

    parameters: PartParameters | None = None
    memory: ModelBytes | None = None


UNKNOWN_SIZES = ModelSizes()


def time_load(model: LayerModel | BlockTimes, stage_to_rank: Sequence[int]) -> Load:
    """Return loads of each stage, nanoseconds: forward and full backward of a microbatch."""
    n_stages = len(stage_to_rank)
    if isinstance(model, BlockTimes):
        stage_of = model.stage
        return _sum_of_stages(
            lambda stage, *span: _work_ns(stage_of(stage, n_stages, *span)), stage_to_rank, False
        )
    # Not rounded for each number of layers: equal work shall be equal wherever its layers are.
    none = [_work_ns(model.stage(stage, n_stages, 0)) for stage in range(n_stages)]
    layer = _work_ns(model.layer)
    return _sum_of_stages(
        lambda stage, start, stop: none[stage] + (stop - start) * layer, stage_to_rank, True
    )


def _work_ns(times: StageTimes) -> int:
    return round(_NS_PER_MS * (times.forward_ms + times.backward_ms))


def parameter_load(sizes: PartParameters, stage_to_rank: Sequence[int]) -> Load:
    """Return loads of each stage: its parameters."""
    last, before = len(stage_to_rank) - 1, [0, *accumulate(sizes.layers)]

    def of_stage(stage: int, start: int, stop: int) -> int:
        ends = sizes.first * (stage == 0) + sizes.last * (stage == last)
        return ends + before[stop] - before[start]

    return _sum_of_stages(of_stage, stage_to_rank, sizes.are_alike)


def _sum_of_stages(
    of_stage: Callable[[int, int, int], int], stage_to_rank: Sequence[int], are_alike: bool
) -> Load:
    """Return a load whose parts are those of a rank's stages, given the layers of each."""
    ranks = stages_of_ranks(stage_to_rank)

    def of_rank(rank: int, spans: Sequence[Span]) -> list[int]:
        return [of_stage(stage, *span) for stage, span in zip(ranks[rank], spans, strict=True)]

    return Load(of_rank, are_alike)


def memory_load(model: ModelBytes, order: ScheduleOrder) -> Load:
    """Return the load of a rank: bytes at the fullest moment of its schedule."""
    ranks = stages_of_ranks(order.stage_to_rank)

    def of_rank(rank: int, spans: Sequence[Span]) -> list[int]:
        stages = {
            stage: {
                **parts_of(stage, order.n_stages, 0),
                **Counter(map(model.layer_name, range(start, stop))),
            }
            for stage, (start, stop) in zip(ranks[rank], spans, strict=True)
        }
        memory = rank_memory(
            model,
            stages,
            order.ranks[rank],
            n_stages=order.n_stages,
            n_microbatches=order.n_microbatches,
        )
        return [memory.total]

    return Load(of_rank, are_alike=not isinstance(model, BlockBytes) or model.are_alike)


def loads_of_ranks(load: Load, split: Sequence[int], stage_to_rank: Sequence[int]) -> list[int]:
    """Return the load of each rank under a split."""
    ends = list(accumulate(split))
    return [
        sum(load.of_rank(rank, [(ends[stage] - split[stage], ends[stage]) for stage in stages]))
        for rank, stages in enumerate(stages_of_ranks(stage_to_rank))
    ]


# Beyond so many actions times splits in a round, the search for the best split stops at the most
# even one: a round would take minutes.
_MAX_ACTIONS_IN_ROUND = 2_000_000
_FREE = Links()


def best_split(
    model: LayerModel | BlockTimes,
    dag: PipelineDag,
    n_processors: float | None = None,
    also: Sequence[Split] = (),
    links: Links = _FREE,
) -> Split:
    """Move layers until no batch without freezing would end sooner.

    Starts from the split whose most loaded rank has least to do, or from one of ``also`` where that
    is faster, and moves one layer at a time, always the one that helps most. The result is no
    slower than any of these; that no other split is faster is not proved.

    Raises:
        ValueError: If there are too few layers for the stages.
    """
    min_layers = model.least_layers(dag.n_stages)
    rank_of = dict(zip(dag.stages.tolist(), dag.ranks.tolist(), strict=True))
    stage_to_rank = [rank_of[stage] for stage in range(dag.n_stages)]
    load = time_load(model, stage_to_rank)
    split = greedy_split if load.are_alike else min_max_split
    return shortest_split(
        [split(model.n_layers, stage_to_rank, load, min_layers), *also],
        min_layers,
        lambda split: unfrozen_batch_ms(dag, model.times(split), n_processors, links),
        n_actions=len(dag.actions),
    )


def shortest_split(
    starts: Sequence[Split],
    min_layers: Split,
    batch_ms: Callable[[Split], float],
    *,
    n_actions: int,
) -> Split:
    """Take the best of ``starts`` and move a layer at a time while the batch gets shorter.

    No stage gets fewer layers than ``min_layers`` has for it. ``n_actions``, those of a batch, tell
    how long it takes to find ``batch_ms``.
    """
    best = min((batch_ms(split), split) for split in starts)
    if n_actions * len(min_layers) ** 2 > _MAX_ACTIONS_IN_ROUND:
        return best[1]
    while True:
        nearby = ((batch_ms(split), split) for split in _neighbours(best[1], min_layers))
        found = min(nearby, default=best)
        if found[0] >= best[0]:
            return best[1]
        best = found


def _neighbours(split: Split, min_layers: Split) -> Iterator[Split]:
    """Yield every split that differs by one layer moved."""
    for giver, taker in itertools.permutations(range(len(split)), 2):
        if split[giver] > min_layers[giver]:
            moved = list(split)
            moved[giver] -= 1
            moved[taker] += 1
            yield tuple(moved)
