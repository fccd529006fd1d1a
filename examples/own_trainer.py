"""A trainer of one's own on torch.distributed.pipelining, with freezing: no TorchTitan.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 examples/own_trainer.py --schedule 1F1B

It trains a small transformer to count on, on GPUs where there are enough, else on CPU. Lines that
are there for freezing end with "# freezing".
"""

import argparse
import os
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from timelyfreeze import TimelyFreeze  # freezing

VOCABULARY, SEQUENCE, EXAMPLES = 64, 64, 16
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


class Piece(nn.Module):
    """The layers of one stage; the first has the embedding, the last the head.

    Layers have their numbers in the whole model, which policies go by.
    """

    def __init__(self, layers: range, width: int, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width) if is_first else None
        layer = partial(nn.TransformerEncoderLayer, batch_first=True, norm_first=True)
        self.layers = nn.ModuleDict({str(n): layer(width, 4, 4 * width, 0.0) for n in layers})
        self.head = nn.Linear(width, VOCABULARY) if is_last else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states, or logits from the last stage."""
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        causal = nn.Transformer.generate_square_subsequent_mask(SEQUENCE, device=hidden.device)
        for layer in self.layers.values():
            hidden = layer(hidden, src_mask=causal, is_causal=True)
        return hidden if self.head is None else self.head(hidden)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of one microbatch."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def held_stages(schedule: str, rank: int, n_ranks: int) -> tuple[list[int], int]:
    """Return the stages of a rank and how many there are: two a rank where a schedule wants it."""
    if issubclass(get_schedule_class(schedule), PipelineScheduleSingle):
        return [rank], n_ranks
    if schedule in V_SHAPED:
        return [rank, 2 * n_ranks - 1 - rank], 2 * n_ranks
    return [rank, rank + n_ranks], 2 * n_ranks


def build_schedule(args: argparse.Namespace, device: torch.device) -> tuple[object, list[Piece]]:
    """Return a schedule as one builds it without freezing, and this rank's modules."""
    indexes, n_stages = held_stages(args.schedule, dist.get_rank(), dist.get_world_size())
    modules = []
    for index in indexes:
        torch.manual_seed(index)
        is_last = index == n_stages - 1
        layers = range(index * args.layers, (index + 1) * args.layers)
        piece = Piece(layers, args.width, is_first=index == 0, is_last=is_last)
        modules.append(piece.to(device))
    stages = [
        PipelineStage(module, index, n_stages, device)
        for module, index in zip(modules, indexes, strict=True)
    ]
    kind = get_schedule_class(args.schedule)
    held = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    return kind(held, n_microbatches=args.microbatches, loss_fn=loss_of), modules


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train, and print what freezing has brought."""
    schedule, modules = build_schedule(args, device)
    parameters = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    freezer = TimelyFreeze(  # freezing
        schedule,
        method=args.method,
        last_warmup_step=4,
        last_monitor_step=16,
        last_ramp_step=20,
        min_gain=-1.0,
        optimizer=optimizer,
    )
    random = torch.Generator().manual_seed(0)
    for t in range(1, args.steps + 1):
        start = torch.randint(VOCABULARY, (EXAMPLES, 1), generator=random)
        tokens = ((start + torch.arange(SEQUENCE + 1)) % VOCABULARY).to(device)
        losses: list[Tensor] = []
        inputs = [tokens[:, :-1]] if modules[0].embedding is not None else []
        with freezer.step(t):  # freezing
            schedule.step(*inputs, target=tokens[:, 1:], losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if losses and t % 10 == 0:
            loss = torch.stack(losses).mean().item()
            print(f"step {t}: loss {loss:.3f}, phase {freezer.phase.value}", flush=True)
    report = freezer.report()  # freezing
    if dist.get_rank() == 0:
        print(report, flush=True)
    freezer.close()  # freezing


def main() -> None:
    """Read the command line, join the other processes, train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", default="1F1B", help="a schedule of torch")
    parser.add_argument("--method", default="timelyfreeze", help="see docs/methods.md")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2, help="of a stage")
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    train(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
