"""Validates a pipeline of a few linear layers on pictures, as the trainer would.

Usage: torchrun --nproc_per_node=2 tests/multiprocess/helpers/image_validation.py SCENARIOS.json
    OUTPUT_FOLDER

A scenario is {"name", "schedule", "stages": on a rank, "pictures": folder}. Each rank writes what
it logged.
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from launcher import run_each_scenario
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.torchtitan.helpers.job_configs import make_job_config
from torchtitan.images.validation import build_image_validator
from torchtitan.upstream.fixes import evaluate_forwards_alone

N_RANKS, N_MICROBATCHES, SIZE, CLASSES = 2, 4, 8, 7


def modules(n_stages):
    """The stages of one model, whatever their number: the first reads pictures."""
    torch.manual_seed(3)
    layers = [torch.nn.Linear(12, 12) for _ in range(4)]
    blocks = [torch.nn.Sequential(layer, torch.nn.Tanh()) for layer in layers]
    first = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * SIZE * SIZE, 12))
    last = torch.nn.Linear(12, CLASSES)
    per_stage = len(blocks) // n_stages
    stages = [blocks[i : i + per_stage] for i in range(0, len(blocks), per_stage)]
    stages[0].insert(0, first)
    stages[-1].append(last)
    return [torch.nn.Sequential(*stage) for stage in stages]


def sum_loss(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


def numbers_of(rank, n_stages, schedule):
    if schedule in ("ZBVZeroBubble", "DualPipeV"):
        return [rank, n_stages - 1 - rank]
    return list(range(rank, n_stages, N_RANKS))


class Logged:
    ntokens_since_last_log, time_last_log = 0, 0.0

    def log_held_out(self, step, parts):
        self.parts = parts

    def log_validation(self, **given):
        self.given = given


def job_config_of(pictures):
    return make_job_config(
        training__dataset="images",
        training__dataset_path=pictures,
        validation__dataset="images",
        validation__local_batch_size=8,
        validation__steps=-1,
        vision__image_size=SIZE,
    )


def build_validator(pictures, logged, **pipeline):
    return build_image_validator(
        job_config=job_config_of(pictures),
        dp_world_size=1,
        dp_rank=0,
        parallel_dims=SimpleNamespace(
            dp_enabled=False,
            cp_enabled=False,
            pp_enabled=bool(pipeline),
            dp_cp_enabled=False,
        ),
        loss_fn=sum_loss,
        validation_context=nullcontext,
        maybe_enable_amp=nullcontext(),
        metrics_processor=logged,
        **pipeline,
    )


def run(scenario, folder):
    import torchtitan.tools.utils as titan_tools

    titan_tools.device_type = "cpu"
    rank, n_stages = dist.get_rank(), N_RANKS * scenario["stages"]
    parts = modules(n_stages)
    numbers = numbers_of(rank, n_stages, scenario["schedule"])
    device = torch.device("cpu")
    stages = [PipelineStage(parts[number], number, n_stages, device) for number in numbers]
    kind = get_schedule_class(scenario["schedule"])
    given = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    schedule = kind(given, N_MICROBATCHES, loss_fn=sum_loss, scale_grads=False)
    evaluate_forwards_alone(schedule)
    logged = Logged()
    validator = build_validator(
        scenario["pictures"],
        logged,
        pp_schedule=schedule,
        pp_has_first_stage=0 in numbers,
        pp_has_last_stage=n_stages - 1 in numbers,
    )
    validator.validate([parts[number] for number in numbers], 3)
    seen = {"has_loss": n_stages - 1 in numbers, **logged.given}
    torch.save(seen, folder / f"rank_{rank}.pt")


if __name__ == "__main__":
    run_each_scenario(run)
