"""A tied model of transformers, cut over two ranks under ZBVZeroBubble and frozen.

Usage: torchrun --nproc_per_node=2 tests/multiprocess/helpers/cut_model_run.py GRADIENT_RANK

Each rank compares its gradients with those of the model in one piece, and says what it had.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

from tests.timelyfreeze.helpers.cut_run import N_STAGES, Run, loss_of
from tests.timelyfreeze.helpers.stages import N_MICROBATCHES
from tests.timelyfreeze.test_model_cut import exact_of_family, make_batch, make_model
from timelyfreeze import partition_model

FAMILY = "Qwen3"


def main() -> None:
    dist.init_process_group("gloo")
    rank, batch = dist.get_rank(), make_batch(FAMILY)
    held = [rank, N_STAGES - 1 - rank]
    cut = partition_model(make_model(FAMILY), N_STAGES, batch[0][:1])
    stages = [PipelineStage(cut[s], s, N_STAGES, torch.device("cpu")) for s in held]
    schedule = ScheduleZBVZeroBubble(stages, N_MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    run = Run(
        schedule,
        [cut[s] for s in held],
        batch,
        has_first=rank == 0,
        gradient_rank=int(sys.argv[1]),
    )
    run.check(exact_of_family(FAMILY))
    print(f"rank {rank}: {len(run.parameters)} gradients are equal", flush=True)
    dist.destroy_process_group()


main()
