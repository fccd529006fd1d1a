"""Torch's schedule objects as one rank of several makes them, in one process."""

from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from timelyfreeze.runtime.torch_pipelining import places_stages_in_v
from timelyfreeze.schedule import stages_per_rank


def build(name: str, n_ranks: int, n_microbatches: int) -> Any:
    """The schedule as rank 0 would make it."""
    per_rank = stages_per_rank(name)
    assert per_rank is not None
    n_stages = per_rank * n_ranks
    mine = [0, n_stages - 1] if places_stages_in_v(name) else range(0, n_stages, n_ranks)
    stages = [PipelineStage(nn.Linear(1, 1), s, n_stages, torch.device("cpu")) for s in mine]
    schedule_class = torch_schedules.get_schedule_class(name)
    return schedule_class(stages if per_rank > 1 else stages[0], n_microbatches, scale_grads=False)
