"""Loads of ranks by time, by parameters and by memory: what a split can make even.

Whole numbers: nanoseconds, parameters, bytes. Of a rank with several stages the sum of their times
or parameters counts, and of memory what the rank holds at its fullest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from timelyfreeze.schedule import ScheduleOrder
from timelyfreeze.whatif.grid import Split
from timelyfreeze.whatif.layer_model import LayerModel
from timelyfreeze.whatif.partition import Load, stages_of_ranks
from timelyfreeze.whatif.rank_memory import ModelBytes, parts_of, rank_memory

TIME, PARAMETERS, MEMORY = "time", "parameters", "memory"
PARTITIONS = (TIME, PARAMETERS, MEMORY)

_NS_PER_MS = 1e6


@dataclass(frozen=True)
class PartParameters:
    """Numbers of parameters: of what the first and the last stage have besides layers.

    Attributes:
        first: The embedding.
        layer: A layer.
        last: The last norm and the head.
    """

    first: int
    layer: int
    last: int


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of the parts of a model; None where they cannot be told."""

    parameters: PartParameters | None = None
    memory: ModelBytes | None = None


UNKNOWN_SIZES = ModelSizes()


def time_load(model: LayerModel, stage_to_rank: Sequence[int]) -> Load:
    """Return loads of each stage, nanoseconds: its forward and its full backward of a microbatch.

    Args:
        model: Times of stages.
        stage_to_rank: Rank that holds each stage.
    """
    ranks, n_stages = stages_of_ranks(stage_to_rank), len(stage_to_rank)

    def work_ns(stage: int, n_layers: int) -> int:
        times = model.stage(stage, n_stages, n_layers)
        return round(_NS_PER_MS * (times.forward_ms + times.backward_ms))

    # Not rounded for each number of layers: equal work shall be equal wherever its layers are.
    none = [work_ns(stage, 0) for stage in range(n_stages)]
    layer = round(_NS_PER_MS * (model.layer.forward_ms + model.layer.backward_ms))
    return lambda rank, layers: [
        none[stage] + n * layer for stage, n in zip(ranks[rank], layers, strict=True)
    ]


def parameter_load(sizes: PartParameters, stage_to_rank: Sequence[int]) -> Load:
    """Return loads of each stage: its parameters."""
    ranks, last = stages_of_ranks(stage_to_rank), len(stage_to_rank) - 1

    def of_stage(stage: int, n_layers: int) -> int:
        ends = sizes.first * (stage == 0) + sizes.last * (stage == last)
        return ends + n_layers * sizes.layer

    return lambda rank, layers: [
        of_stage(stage, n) for stage, n in zip(ranks[rank], layers, strict=True)
    ]


def memory_load(model: ModelBytes, order: ScheduleOrder) -> Load:
    """Return the load of a rank: bytes at the fullest moment of its schedule."""
    ranks = stages_of_ranks(order.stage_to_rank)

    def of_rank(rank: int, layers: Split) -> list[int]:
        stages = {
            stage: parts_of(stage, order.n_stages, n)
            for stage, n in zip(ranks[rank], layers, strict=True)
        }
        memory = rank_memory(
            model,
            stages,
            order.ranks[rank],
            n_stages=order.n_stages,
            n_microbatches=order.n_microbatches,
        )
        return [memory.total]

    return of_rank


def loads_of_ranks(load: Load, split: Sequence[int], stage_to_rank: Sequence[int]) -> list[int]:
    """Return the load of each rank under a split."""
    return [
        sum(load(rank, tuple(split[stage] for stage in stages)))
        for rank, stages in enumerate(stages_of_ranks(stage_to_rank))
    ]
