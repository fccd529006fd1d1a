"""Trains with the library alone, two pipelines of two ranks each, and notes what it froze.

Usage: torchrun --nproc_per_node=4 tests/multiprocess/helpers/library_run.py SCENARIOS.json
    OUTPUT_FOLDER

A scenario is {"name", "schedule", "arguments"}. Each rank writes whether the gradients of every
step were those of a plain chain of the same modules times the masks, to the last bit.
"""

import torch
import torch.distributed as dist
from launcher import run_each_scenario
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from tests.timelyfreeze.helpers.stages import (
    N_MICROBATCHES,
    expected,
    make_batch,
    make_modules,
    sum_loss,
)
from timelyfreeze import TimelyFreeze
from timelyfreeze.runtime import FreezingStage, greet_other_ranks_alone

N_RANKS = 2
STEPS = 12


def groups():
    """The group of this process's pipeline, and the one of those that hold the same stages."""
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return pipelines[dist.get_rank() // N_RANKS], replicas[dist.get_rank() % N_RANKS]


def whole_model(n_stages):
    modules = make_modules()
    if n_stages == 2:
        modules = [torch.nn.Sequential(*modules[:2]), torch.nn.Sequential(*modules[2:])]
    return modules


def run(scenario, folder):
    pipeline, replicas = groups()
    rank = dist.get_rank(pipeline)
    kind = get_schedule_class(scenario["schedule"])
    is_single = issubclass(kind, PipelineScheduleSingle)
    n_stages = 2 if is_single else 4
    held = [rank] if is_single else [rank, rank + 2]
    if scenario["schedule"] in ("ZBVZeroBubble", "DualPipeV"):
        held = [rank, 3 - rank]
    modules = whole_model(n_stages)
    stages = [
        PipelineStage(modules[s], s, n_stages, torch.device("cpu"), group=pipeline) for s in held
    ]
    greet_other_ranks_alone(stages)
    schedule = kind(
        stages[0] if is_single else stages, N_MICROBATCHES, loss_fn=sum_loss, scale_grads=False
    )
    parameters = [p for s in held for p in modules[s].parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    freezer = TimelyFreeze(
        schedule,
        warmup=1,
        monitor=7,
        ramp=9,
        discard_batches=1,
        min_gain=-1.0,
        skip_input_grads="off",
        optimizer=optimizer,
        data_parallel_group=replicas,
        **scenario["arguments"],
    )
    masks = {}

    def noting(stage):
        def freeze(given, **kwargs):
            masks[stage.stage_index] = {m: mask.tolist() for m, mask in given.items()}
            FreezingStage.freeze(stage, given, **kwargs)

        return freeze

    for stage in stages:
        stage.freeze = noting(stage)
    seen = {"differ": [], "masks": [], "n_frozen": 0}
    for t in range(1, STEPS + 1):
        tokens, labels = make_batch(t)
        with freezer.step(t):
            schedule.step(tokens, target=labels)
        own = [a for a, _, _ in freezer._controller._recorder._finished[-1]]
        arrays = {s: {m: torch.tensor(v).numpy() for m, v in of.items()} for s, of in masks.items()}
        wanted = expected(modules, own, arrays, (tokens, labels))
        for s in held:
            pairs = zip(modules[s].parameters(), wanted.gradients[s], strict=True)
            for i, (parameter, gradient) in enumerate(pairs):
                same = (parameter.grad is None) == (gradient is None)
                if same and gradient is not None:
                    same = torch.equal(parameter.grad, gradient)
                if not same:
                    seen["differ"].append((t, s, i))
                seen["n_frozen"] += gradient is None
        seen["masks"].append({s: dict(of) for s, of in masks.items()})
        optimizer.step()
        optimizer.zero_grad()
    report = freezer.report()
    seen["report"] = (report.step, report.phase.value, report.planned_batch_ms)
    seen["plan"] = None if freezer.plan is None else freezer.plan.ratios.tolist()
    seen["state"] = sorted(freezer.state_dict())
    seen["number"] = freezer._exchange.rank
    freezer.close()
    torch.save(seen, folder / f"rank_{dist.get_rank()}.pt")


if __name__ == "__main__":
    run_each_scenario(run)
