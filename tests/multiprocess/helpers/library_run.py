"""Trains with the library alone, two pipelines of two ranks each, and notes what it froze.

Usage: torchrun --nproc_per_node=4 tests/multiprocess/helpers/library_run.py SCENARIOS.json
    OUTPUT_FOLDER

A scenario is {"name", "schedule", "arguments"}; "csv" is an order that replaces the schedule's own,
and with "shards" the two pipelines split their stages between them. Each rank writes whether the
gradients of every step were those of a plain chain of the same modules times the masks, to the last
bit; where stages are split, the mean of two such chains, one for the batch of each pipeline.

A scenario with "cache" trains over a few epochs without and with an activation cache, each pipeline
on rows of its own, and notes what was learned.
"""

import torch
import torch.distributed as dist
from imported import always_reads  # noqa: F401 - this import has the cache read whatever that costs
from launcher import run_each_scenario
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from tests.timelyfreeze.helpers.layered import EVEN_WIDTH, Layer, make_parts
from tests.timelyfreeze.helpers.rows import NumberedRows
from tests.timelyfreeze.helpers.stages import (
    N_MICROBATCHES,
    Block,
    expected,
    make_batch,
    make_modules,
    sum_loss,
)
from timelyfreeze import ActivationCache, TimelyFreeze
from timelyfreeze.runtime import FreezingStage

N_RANKS = 2
STEPS = 12
EPOCHS = 3


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


def shard(module, replicas):
    """Split a stage between the processes that hold it: each block, and what is left."""
    mesh = DeviceMesh.from_group(replicas, "cpu")
    for part in [m for m in module.modules() if isinstance(m, (Block, Layer)) and m is not module]:
        fully_shard(part, mesh=mesh, reshard_after_forward=False)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    module.set_gradient_divide_factor(dist.get_world_size(replicas))
    for part in module.modules():
        if hasattr(part, "set_force_sum_reduction_for_comms"):
            part.set_force_sum_reduction_for_comms(True)  # gloo knows no mean


def mean(gradients):
    """Of the same parameter in each pipeline; None where it is frozen."""
    return None if gradients[0] is None else sum(gradients) / len(gradients)


def held_stages(name, rank):
    """The stages of a pipeline's rank, and how many there are."""
    if issubclass(get_schedule_class(name), PipelineScheduleSingle):
        return [rank], 2
    return [rank, 3 - rank] if name in ("ZBVZeroBubble", "DualPipeV") else [rank, rank + 2], 4


def build(name, modules, held, pipeline):
    """A schedule and its stages, as one builds them without freezing."""
    kind = get_schedule_class(name)
    device = torch.device("cpu")
    stages = [PipelineStage(modules[s], s, len(modules), device, group=pipeline) for s in held]
    of_rank = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    return kind(of_rank, N_MICROBATCHES, loss_fn=sum_loss, scale_grads=False), stages


def train_epochs(scenario, cache):
    """Train over rows of this pipeline; return losses, weights, and batches that were read."""
    pipeline, replicas = groups()
    held, n_stages = held_stages(scenario["schedule"], dist.get_rank(pipeline))
    modules = make_parts(n_stages, 8 // n_stages, width=EVEN_WIDTH)
    if scenario["shards"]:
        for s in held:
            shard(modules[s], replicas)
    schedule, _ = build(scenario["schedule"], modules, held, pipeline)
    parameters = [p for s in held for p in modules[s].parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    freezer = TimelyFreeze(
        schedule,
        last_warmup_step=1,
        optimizer=optimizer,
        data_parallel_group=replicas,
        cache=cache,
        **scenario["arguments"],
    )
    data = NumberedRows(seed=5 + dist.get_rank(replicas))
    seen = {"losses": []}
    for t, numbers in enumerate(data.order(scenario.get("epochs", EPOCHS)), start=1):
        tokens, labels = data.batch(numbers)
        with freezer.step(t, None if cache is None else [data.rows(numbers)]):
            schedule.step(*[tokens] * (0 in held), target=labels, losses=(losses := []))
        seen["losses"] += [loss.detach() for loss in losses]
        if not scenario["shards"]:
            for p in parameters:
                if p.grad is not None:
                    dist.all_reduce(p.grad, group=replicas)
        optimizer.step()
        optimizer.zero_grad()
        if cache is not None:
            freezer._controller.cache.store.flush()  # no step waits for the writer
    use = freezer.report().cache
    seen["entered"] = None if use is None else use.entered
    freezer.close()
    whole = [p.full_tensor() if scenario["shards"] else p for p in parameters]
    seen["weights"] = [p.detach().clone() for p in whole]
    return seen


def run_cached(scenario, folder):
    cache = ActivationCache(embedding="embedding", **scenario["cache"])
    seen = {"plain": train_epochs(scenario, None), "cached": train_epochs(scenario, cache)}
    torch.save(seen, folder / f"rank_{dist.get_rank()}.pt")


def run(scenario, folder):
    if "cache" in scenario:
        run_cached(scenario, folder)
        return
    pipeline, replicas = groups()
    shards = scenario.get("shards", False)
    held, n_stages = held_stages(scenario["schedule"], dist.get_rank(pipeline))
    modules, plain = whole_model(n_stages), whole_model(n_stages)
    if shards:
        for s in held:
            shard(modules[s], replicas)
    schedule, stages = build(scenario["schedule"], modules, held, pipeline)
    if "csv" in scenario:
        # A file of one's own: another rank that began to write a common one would leave it empty.
        order = folder / f"order_{dist.get_rank()}.csv"
        order.write_text(scenario["csv"])
        schedule._load_csv(str(order))
    parameters = [p for s in held for p in modules[s].parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    freezer = TimelyFreeze(
        schedule,
        last_warmup_step=1,
        last_monitor_step=7,
        last_ramp_step=9,
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
    which = dist.get_rank(replicas)
    for t in range(1, STEPS + 1):
        batches = [make_batch(t), make_batch(STEPS + t)] if shards else [make_batch(t)]
        tokens, labels = batches[which if shards else 0]
        with freezer.step(t):
            schedule.step(*[tokens] * (0 in held), target=labels)
        own = [a for a, _, _ in freezer._controller._recorder._finished[-1]]
        arrays = {s: {m: torch.tensor(v).numpy() for m, v in of.items()} for s, of in masks.items()}
        chains = [expected(plain, own, arrays, batch) for batch in batches]
        for s in held:
            wanted = [mean(alike) for alike in zip(*(c.gradients[s] for c in chains), strict=True)]
            pairs = zip(modules[s].parameters(), wanted, strict=True)
            for i, (parameter, gradient) in enumerate(pairs):
                same = (parameter.grad is None) == (gradient is None)
                if same and gradient is not None:
                    got = parameter.grad.full_tensor() if shards else parameter.grad
                    same = torch.equal(got, gradient)
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
