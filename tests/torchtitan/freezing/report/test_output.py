"""Which process shows a run whose pipeline becomes shorter."""

import pytest
import torch
import torchtitan.components.metrics as titan_metrics
from torchtitan.distributed import ParallelDims

from torchtitan.freezing.config.job_config import JobConfig


@pytest.mark.parametrize("world_size", [2, 4, 6, 8, 12, 16, 64])
def test_what_had_the_loss_first_has_it_in_each_shorter_pipeline(world_size: int) -> None:
    """Processes are numbered stage by stage, replicas within each."""
    pipelines = [n for n in range(1, world_size + 1) if world_size % n == 0]
    for first in pipelines:
        dims = ParallelDims(1, world_size // first, 1, 1, first, 1, 1, world_size)
        shown = titan_metrics._get_metrics_rank(dims, JobConfig())
        for later in (n for n in pipelines if n <= first):
            of_stage = torch.arange(world_size).reshape(later, -1)
            assert shown in of_stage[-1]
