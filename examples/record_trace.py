"""Traces for `timelyfreeze plan`, recorded in a pipeline of plain torch: no trainer, no freezing.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node=4 examples/record_trace.py --layers 3 3 3 3
    timelyfreeze plan trace_rank*.json.gz --layers 3,3,3,3 --splits default balanced

Lines for the traces end with "# trace". torch's 1F1B annotates no actions; ScheduleInterleaved1F1B
does, takes one stage of each rank too, and runs about the same order.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.profiler import profile  # trace

VOCABULARY, SEQUENCE, WIDTH, EXAMPLES = 2048, 64, 64, 2


def stage_of(rank: int, layers: list[int]) -> nn.Module:
    """Return a rank's layers, with the embedding in front and the head behind."""
    parts: list[nn.Module] = [nn.Embedding(VOCABULARY, WIDTH)] if rank == 0 else []
    for _ in range(layers[rank]):
        parts.append(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True))
    parts += [nn.Linear(WIDTH, VOCABULARY)] if rank == len(layers) - 1 else []
    return nn.Sequential(*parts)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of one microbatch."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    """Train a few steps, and write the trace of this rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="+", type=int, default=[3, 3, 3, 3])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path())
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, n_stages = dist.get_rank(), len(options.layers)
    stage = PipelineStage(stage_of(rank, options.layers), rank, n_stages, torch.device("cpu"))
    schedule = ScheduleInterleaved1F1B([stage], options.microbatches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(stage.submod.parameters())
    tokens = torch.randint(VOCABULARY, (options.microbatches * EXAMPLES, SEQUENCE))

    def step() -> None:
        optimizer.zero_grad()
        inputs = [tokens] if rank == 0 else []
        schedule.step(*inputs, **({"target": tokens} if rank == n_stages - 1 else {}))
        optimizer.step()

    step()
    with profile() as profiler:  # trace
        for _ in range(3):
            step()
    profiler.export_chrome_trace(str(options.output / f"trace_rank{rank}.json.gz"))  # trace
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
