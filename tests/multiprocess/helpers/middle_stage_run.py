"""Runs batches of a pipeline of three ranks, so that one has neither end, and compares gradients.

Usage: torchrun --nproc_per_node=3 tests/multiprocess/helpers/middle_stage_run.py SCENARIOS.json
    OUTPUT_FOLDER

A scenario is {"name", "schedule", "rows", "shards"}. With "shards" each stage is under FSDP2, alone
in its mesh, as TorchTitan 0.3 has it. Each rank writes how each batch went.
"""

import numpy as np
import torch
import torch.distributed as dist
from launcher import run_each_scenario
from library_run import shard
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from tests.timelyfreeze.helpers.stages import VOCABULARY, Block, Embedding, Head, expected, sum_loss
from timelyfreeze.runtime import ActionRecorder, adopt_stages, clock_for

N_RANKS = 3
N_MICROBATCHES = 6  # DualPipeV needs one for each stage


def held_stages(name, rank):
    """The stages of a rank, and how many there are."""
    if issubclass(get_schedule_class(name), PipelineScheduleSingle):
        return [rank], N_RANKS
    second = 2 * N_RANKS - 1 - rank if name in ("ZBVZeroBubble", "DualPipeV") else rank + N_RANKS
    return [rank, second], 2 * N_RANKS


def whole_model(n_stages):
    torch.manual_seed(0)
    middle = [Block() for _ in range(n_stages - 2)]
    return [nn.Sequential(Embedding(), Block()), *middle, nn.Sequential(Block(), Head())]


def masks_of(modules, ratio):
    """What each stage freezes in each microbatch, and where the chain of input gradients ends.

    In microbatch 0 the front half is frozen whole, and everything in microbatch 1.
    """
    random = np.random.default_rng(int(10 * ratio))
    masks, cut = [], []
    for stage, module in enumerate(modules):
        n = len(list(module.parameters()))
        of_stage = {m: random.random(n) < ratio for m in range(N_MICROBATCHES)}
        if ratio > 0:
            of_stage[0] |= stage < len(modules) // 2
            of_stage[1] |= True
        masks.append(of_stage)
        front = {0: stage <= len(modules) // 2, 1: True}
        cut.append([m for m, is_cut in front.items() if is_cut and stage and ratio > 0])
    return dict(enumerate(masks)), cut


def run(scenario, folder):
    rank = dist.get_rank()
    alone = [dist.new_group([r]) for r in range(N_RANKS)][rank]
    name = scenario["schedule"]
    held, n_stages = held_stages(name, rank)
    modules, plain = whole_model(n_stages), whole_model(n_stages)
    if scenario["shards"]:
        for s in held:
            shard(modules[s], alone)
    stages = [PipelineStage(modules[s], s, n_stages, torch.device("cpu")) for s in held]
    kind = get_schedule_class(name)
    of_rank = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    schedule = kind(of_rank, N_MICROBATCHES, loss_fn=sum_loss, scale_grads=False)
    adopt_stages(stages)
    recorder = ActionRecorder(clock_for(torch.device("cpu")))
    for stage in stages:
        stage.attach(recorder)
    seen = {"differ": [], "n_compared": 0, "n_frozen": 0, "losses": []}
    shape = (scenario["rows"] * N_MICROBATCHES, 3)
    for ratio in (0.0, 0.4, 0.9, 0.4):
        tokens, labels = (torch.randint(VOCABULARY, shape) for _ in range(2))  # alike on all ranks
        masks, cut = masks_of(modules, ratio)
        for stage in stages:
            index = stage.stage_index
            stage.freeze(masks[index], without_input_grads=cut[index])
        losses = []
        with recorder.recorded_batch():
            schedule.step(*[tokens] * (0 in held), target=labels, losses=losses)
        (record,) = recorder.drain()
        wanted = expected(plain, list(record.durations_ms), masks, (tokens, labels), N_MICROBATCHES)
        if losses:
            seen["losses"].append(all(map(torch.equal, losses, wanted.losses)))
        for s in held:
            pairs = zip(modules[s].named_parameters(), wanted.gradients[s], strict=True)
            for (parameter_name, parameter), gradient in pairs:
                got = parameter.grad
                if got is not None and scenario["shards"]:
                    got = got.full_tensor()
                same = (got is None) == (gradient is None)
                if same and gradient is not None:
                    same = torch.equal(got, gradient)
                    seen["n_compared"] += 1
                seen["n_frozen"] += gradient is None
                if not same:
                    seen["differ"].append((ratio, s, parameter_name))
            modules[s].zero_grad()
    torch.save(seen, folder / f"rank_{rank}.pt")


if __name__ == "__main__":
    run_each_scenario(run)
