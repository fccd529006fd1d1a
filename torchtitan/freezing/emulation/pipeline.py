"""Builds a whole pipeline in a process: all ranks' stages, and a common order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial, reduce
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from timelyfreeze.control import merge_ranks
from timelyfreeze.runtime import run_in_order
from torchtitan.settings import JobConfig, pipeline_order, stage_modules

# Any multi-stage schedule of torch that takes all stages on one rank; its own order is replaced.
_VEHICLE = "LoopedBFS"


@contextmanager
def as_one_process(config: JobConfig) -> Iterator[None]:
    """Let upstream set up this process as a world of its own."""
    parallelism = config.parallelism
    config.parallelism = replace(parallelism, pipeline_parallel_degree=1)
    try:
        yield
    finally:
        config.parallelism = parallelism


def build_emulated_pipeline(
    build: Callable[..., Any],
    model: nn.Module,
    parallel_dims: EmulatedDims,
    config: JobConfig,
    device: torch.device,
    model_args: Any,
    *others: Any,
) -> tuple[Any, list[nn.Module], bool, bool]:
    """Build the pipeline of upstream's ``pipelining_fn``, ``build``, with all stages here.

    The function builds a single rank, whose schedule then gets the merged order of all ranks.
    """
    order = pipeline_order(config, model_args.n_layers)
    asked = config.parallelism
    of_one = replace(
        asked,
        pipeline_parallel_degree=1,
        pipeline_parallel_schedule=_VEHICLE,
        pipeline_parallel_schedule_csv="",
        pipeline_parallel_layers_per_stage=None,
        pipeline_parallel_expert_parallel_overlap=False,
        module_fqns_per_model_part=stage_modules(config, model_args.n_layers),
    )
    config = replace(config, parallelism=of_one)
    built = build(model, parallel_dims, config, device, model_args, *others)
    schedule, model_parts, *_ = built
    actions = merge_ranks(order)
    run_in_order(schedule, actions)
    parallel_dims.pipeline.place(model_parts, order.stage_to_rank)
    if config.debug.seed is not None:
        _draw_weights_as_ranks(model_parts, order.stage_to_rank, config.debug.seed)
    logger.info(
        "Emulating %d ranks and %d stages of %s in this process: %d actions a batch, one at a time",
        order.n_ranks,
        order.n_stages,
        asked.pipeline_parallel_schedule_csv or asked.pipeline_parallel_schedule,
        len(actions),
    )
    return built


def _draw_weights_as_ranks(
    model_parts: Sequence[nn.Module], stage_to_rank: Sequence[int], seed: int
) -> None:
    """Draw initial weights as ranks do, from the seed plus their number, stage by stage."""
    for rank, parts in enumerate(parts_of_ranks(model_parts, stage_to_rank)):
        # Of the rank's random numbers, which stand still while others draw.
        states: list[Tensor] = []
        for part in parts:
            draw = part.init_weights
            part.init_weights = partial(_drawn, draw, (seed + rank) % 2**64, states)


def _drawn(
    draw: Callable[..., None], seed: int, states: list[Tensor], *args: Any, **kwargs: Any
) -> None:
    """Draw with the random numbers of ``states``, or else of a seed, instead of the process's."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        if not states:
            torch.manual_seed(seed)
        else:
            torch.set_rng_state(states[0])
            for device, state in zip(devices, states[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
        draw(*args, **kwargs)
        cuda_states = [torch.cuda.get_rng_state(device) for device in devices]
        states[:] = [torch.get_rng_state(), *cuda_states]


class EmulatedMesh:
    """The mesh's pipeline dimension: a group of one, and the stages of ranks."""

    def __init__(self) -> None:
        self._ranks: list[list[nn.Module]] = []

    def size(self) -> int:
        """Return 1: the stages of all ranks are here."""
        return 1

    def get_local_rank(self) -> int:
        """Return 0."""
        return 0

    def get_group(self, mesh_dim: Any = None) -> dist.ProcessGroup | None:
        """Return the group of this process alone."""
        return dist.group.WORLD

    def place(self, model_parts: Sequence[nn.Module], stage_to_rank: Sequence[int]) -> None:
        """Set the rank of each stage, in the order of stages."""
        self._ranks = parts_of_ranks(model_parts, stage_to_rank)

    def clear(self) -> None:
        """Let go of all stages."""
        self._ranks = []

    @torch.no_grad()
    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, *, foreach: bool | None = None
    ) -> Tensor:
        """Clip as the ranks of a pipeline do, to the last bit, and return the total norm.

        Ranks take the norm of their gradients, and the squares are added over the ranks. The norm
        of all gradients at once would be rounded elsewhere, and clipping would carry the error into
        every weight. Squares are added in the order of gloo's ring, from the last rank to the
        first; with NCCL the order depends on the machine.
        """
        squares = []
        for parts in self._ranks:
            mine = [p.grad for part in parts for p in part.parameters() if p.grad is not None]
            squares.append(nn.utils.get_total_norm(mine, foreach=foreach) ** 2.0)
        total_norm = reduce(torch.add, reversed(squares)) ** 0.5
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total_norm, foreach)
        return total_norm


class LoneDims(ParallelDims):
    """Upstream's dimensions with pipelines of a rank each, which upstream takes for none."""

    @classmethod
    def of(cls, world: ParallelDims) -> Self:
        """Return the dimensions of ``world``, with a pipeline."""
        return cls(**{f.name: getattr(world, f.name) for f in fields(world) if f.init})

    @property
    def pp_enabled(self) -> bool:
        """Return True: there is a schedule, and its stages are the model's parts."""
        return True

    def _mesh_exist(self, name: str, degree: int) -> bool:
        return name == "pp" or bool(super()._mesh_exist(name, degree))


class EmulatedDims(LoneDims):
    """Dimensions of a world of a single process, which has the stages of all ranks."""

    pipeline: EmulatedMesh

    def __post_init__(self) -> None:
        """Have a mesh without stages."""
        super().__post_init__()
        self.pipeline = EmulatedMesh()

    def get_optional_mesh(self, dims: str | list[str]) -> Any:
        """Return the pipeline's mesh for "pp", and otherwise upstream's answer."""
        return self.pipeline if dims in ("pp", ["pp"]) else super().get_optional_mesh(dims)


def parts_of_ranks(
    model_parts: Sequence[nn.Module], stage_to_rank: Sequence[int]
) -> list[list[nn.Module]]:
    """Return the modules of ranks, in the order of stages."""
    ranks: list[list[nn.Module]] = [[] for _ in range(max(stage_to_rank) + 1)]
    for part, rank in zip(model_parts, stage_to_rank, strict=True):
        ranks[rank].append(part)
    return ranks
