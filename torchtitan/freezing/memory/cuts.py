"""What a rank's memory holds by the layers that it has, some of them frozen."""

from __future__ import annotations

from timelyfreeze.whatif.rank_memory import (
    LAYER,
    RankMemory,
    frozen_parts,
    parts_of,
    rank_memory,
)
from torchtitan.freezing.config import JobConfig, pipeline_order
from torchtitan.freezing.memory.estimate import model_bytes


class CutMemory:
    """Tells what ranks need, wherever the model is cut.

    Args:
        job_config: A run with one stage on each rank.
        n_layers: Layers of its model.

    Raises:
        ValueError: As ``model_bytes``.
    """

    def __init__(self, job_config: JobConfig, n_layers: int) -> None:
        self._model = model_bytes(job_config)
        self._order = pipeline_order(job_config, n_layers)

    def of_rank(self, rank: int, start: int, stop: int, n_frozen: int = 0) -> RankMemory:
        """Return what a rank holds at its fullest.

        Args:
            rank: Which one.
            start: Its first layer.
            stop: The layer behind its last.
            n_frozen: Layers in front of the model that are frozen, the embedding with them.
        """
        order = self._order
        parts = parts_of(rank, order.n_stages, stop - start)
        live, frozen = frozen_parts(parts, min(max(n_frozen - start, 0), parts[LAYER]))
        return rank_memory(
            self._model,
            {rank: live},
            order.ranks[rank],
            n_stages=order.n_stages,
            n_microbatches=order.n_microbatches,
            frozen=frozen,
        )

    def of_fullest(self, split: tuple[int, ...], n_frozen: int = 0) -> int:
        """Return the bytes of the rank that holds most, of a cut given by layers of each rank."""
        ends = [sum(split[: rank + 1]) for rank in range(len(split))]
        return max(
            self.of_rank(rank, end - n, end, n_frozen).total
            for rank, (n, end) in enumerate(zip(split, ends, strict=True))
        )
