"""One process in the shape of a pipeline: what upstream asks of its meshes, answered for all ranks.

The world is this process alone, so that stages find every neighbour here and nothing is sent. Still
it is a pipeline: it has stages, a schedule, and ranks whose gradients are added up one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.distributed import ParallelDims


class EmulatedMesh:
    """The pipeline dimension of the mesh: a group of one, and which stages each rank would hold."""

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
        """Say which rank would hold each stage.

        Args:
            model_parts: The stages' modules, in the order of stages.
            stage_to_rank: Rank of each.
        """
        self._ranks = parts_of_ranks(model_parts, stage_to_rank)

    def clear(self) -> None:
        """Let go of all stages."""
        self._ranks = []

    @torch.no_grad()
    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, *, foreach: bool | None = None
    ) -> Tensor:
        """Clip as the ranks of a pipeline do, to the last bit.

        Each rank takes the norm of its own gradients, and the squares are added over the ranks. The
        norm of all gradients at once would be rounded elsewhere, and clipping would carry that into
        every weight. They are added in the order of gloo's ring, from the last rank to the first;
        with NCCL the order depends on the machine.

        Args:
            parameters: Those of all ranks.
            max_norm: As upstream's, like ``foreach``.
            foreach: Whether to use the faster implementation.

        Returns:
            Tensor: Total norm of the gradients, a scalar.
        """
        squares = []
        for parts in self._ranks:
            mine = [p.grad for part in parts for p in part.parameters() if p.grad is not None]
            squares.append(nn.utils.get_total_norm(mine, foreach=foreach) ** 2.0)
        total_norm = reduce(torch.add, reversed(squares)) ** 0.5
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total_norm, foreach)
        return total_norm


class EmulatedDims(ParallelDims):
    """Upstream's dimensions of a world of one process, with the pipeline switched on."""

    pipeline: EmulatedMesh

    @classmethod
    def of(cls, world: ParallelDims) -> EmulatedDims:
        """Return the dimensions of ``world``, which has one process, with a pipeline in it."""
        values = {f.name: getattr(world, f.name) for f in fields(world) if f.init}
        emulated = cls(**values)
        emulated.pipeline = EmulatedMesh()
        return emulated

    @property
    def pp_enabled(self) -> bool:
        """Return True: there is a schedule, and its stages are the model's parts."""
        return True

    def get_optional_mesh(self, dims: str | list[str]) -> Any:
        """Return the pipeline's mesh for "pp", and otherwise upstream's answer."""
        return self.pipeline if dims in ("pp", ["pp"]) else super().get_optional_mesh(dims)


def parts_of_ranks(
    model_parts: Sequence[nn.Module], stage_to_rank: Sequence[int]
) -> list[list[nn.Module]]:
    """Return the modules that each rank would hold, in the order of stages."""
    ranks: list[list[nn.Module]] = [[] for _ in range(max(stage_to_rank) + 1)]
    for part, rank in zip(model_parts, stage_to_rank, strict=True):
        ranks[rank].append(part)
    return ranks
