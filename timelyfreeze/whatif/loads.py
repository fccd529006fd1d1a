"""Loads of ranks by time, by parameters and by memory: what a split can make even.

Whole numbers: nanoseconds, parameters, bytes. Of a rank with several stages the sum of their times
or parameters counts, and of memory what the rank holds at its fullest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from timelyfreeze.schedule import ScheduleOrder
from timelyfreeze.whatif.block_times import BlockTimes
from timelyfreeze.whatif.layer_model import LayerModel
from timelyfreeze.whatif.partition import Load, Span, stages_of_ranks
from timelyfreeze.whatif.rank_memory import BlockBytes, ModelBytes, parts_of, rank_memory
from timelyfreeze.whatif.times import StageTimes

TIME, PARAMETERS, MEMORY = "time", "parameters", "memory"
PARTITIONS = (TIME, PARAMETERS, MEMORY)

_NS_PER_MS = 1e6


@dataclass(frozen=True)
class PartParameters:
    """Numbers of parameters.

    Attributes:
        first: The embedding.
        layers: Each layer.
        last: The last norm and the head.
    """

    first: int
    layers: tuple[int, ...]
    last: int

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
    """Return loads of each stage, nanoseconds: its forward and its full backward of a microbatch.

    Args:
        model: Times of stages.
        stage_to_rank: Rank that holds each stage.
    """
    ranks, n_stages = stages_of_ranks(stage_to_rank), len(stage_to_rank)
    if isinstance(model, BlockTimes):
        stage_of = model.stage
        return Load(
            lambda rank, spans: [
                _work_ns(stage_of(stage, n_stages, *span))
                for stage, span in zip(ranks[rank], spans, strict=True)
            ],
            are_alike=False,
        )
    # Not rounded for each number of layers: equal work shall be equal wherever its layers are.
    none = [_work_ns(model.stage(stage, n_stages, 0)) for stage in range(n_stages)]
    layer = _work_ns(model.layer)
    return Load(
        lambda rank, spans: [
            none[stage] + (stop - start) * layer
            for stage, (start, stop) in zip(ranks[rank], spans, strict=True)
        ]
    )


def _work_ns(times: StageTimes) -> int:
    return round(_NS_PER_MS * (times.forward_ms + times.backward_ms))


def parameter_load(sizes: PartParameters, stage_to_rank: Sequence[int]) -> Load:
    """Return loads of each stage: its parameters."""
    ranks, last = stages_of_ranks(stage_to_rank), len(stage_to_rank) - 1

    before = [0, *accumulate(sizes.layers)]

    def of_stage(stage: int, start: int, stop: int) -> int:
        ends = sizes.first * (stage == 0) + sizes.last * (stage == last)
        return ends + before[stop] - before[start]

    return Load(
        lambda rank, spans: [
            of_stage(stage, *span) for stage, span in zip(ranks[rank], spans, strict=True)
        ],
        are_alike=sizes.are_alike,
    )


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
