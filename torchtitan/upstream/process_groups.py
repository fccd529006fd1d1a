"""Ends process groups that nothing refers to any more, by torch's private list of them."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d


def end_all_but_the_default() -> None:
    """End every process group but the default one; every process must call this together.

    Device meshes make groups and have no way to end them.
    """
    default = dist.group.WORLD
    for group in list(distributed_c10d._world.pg_map):
        if group is not default:
            dist.destroy_process_group(group)
