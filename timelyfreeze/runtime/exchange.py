"""The few words ranks exchange about freezing, over ``torch.distributed``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


class Exchange:
    """Object collectives of one process group.

    Args:
        group: The process group; None is the default group of all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of ranks, on every rank.

        Args:
            value: Anything that pickles.
        """
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def gather(self, value: Any) -> list[Any] | None:
        """Return every rank's value on rank 0 and None elsewhere."""
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, group=self._group, group_dst=0)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]
