"""Loads Hugging Face folders into pipelines, trains a little if asked to, and writes the logits.

Usage: torchrun --nproc_per_node=N tests/multiprocess/helpers/pipeline_logits.py SCENARIOS.json
    OUTPUT

A scenario is {"name", "args", "tokens": file of ids or null, "steps": to train, "save": bool}, with
"resumes": the name of an earlier one whose run goes on, its last checkpoint taken away. Each rank
writes OUTPUT/NAME/rank_R.pt with the names it read from files, the names and types of the weights
it holds, the ends of the model if they are its own, and the logits if it has them.
"""

import shutil

import torch
import torch.distributed as dist
from launcher import run_each_scenario, spare_last_pause
from torch.distributed.checkpoint import HuggingFaceStorageReader

from torchtitan.freezing.launch import prepare


def note_reads(seen):
    """Note the name and the size of everything that is read from a folder."""
    original = HuggingFaceStorageReader.read_data

    def read_data(self, plan, planner):
        for item in plan.items:
            seen["read"].append((item.storage_index.fqn, item.lengths.numel()))
        return original(self, plan, planner)

    HuggingFaceStorageReader.read_data = read_data
    return original


@torch.no_grad()
def logits_of(trainer, tokens):
    """Return the logits on the rank of the last stage, None on the others."""
    if not trainer.parallel_dims.pp_enabled:
        return trainer.model_parts[0](tokens)
    schedule = trainer.pp_schedule
    inputs = [tokens] if trainer.pp_has_first_stage else []
    if not trainer.pp_has_last_stage:
        schedule.eval(*inputs)
        return None
    loss = schedule._loss_fn
    schedule._loss_fn = None  # logits alone are wanted
    try:
        return schedule.eval(*inputs, return_outputs=True)
    finally:
        schedule._loss_fn = loss


def forget_last_checkpoint(run_folder):
    """Leave the run as if it had been stopped before its end."""
    if dist.get_rank() == 0:
        steps = (run_folder / "checkpoint").glob("step-*")
        shutil.rmtree(max(steps, key=lambda step: int(step.name.removeprefix("step-"))))
    dist.barrier()


def run(scenario, folder):
    dump_folder = folder
    if earlier := scenario.get("resumes"):
        dump_folder = folder.with_name(earlier)
        forget_last_checkpoint(dump_folder)
    job_config = prepare([*scenario["args"], f"--job.dump_folder={dump_folder}"])
    import torchtitan.train as titan_train

    from torchtitan.freezing.trainer import FreezingTrainer

    spare_last_pause(titan_train)
    seen = {"read": [], "logits": None}
    original = note_reads(seen)
    trainer = FreezingTrainer(job_config)
    if scenario.get("steps"):
        trainer.train()
    else:
        trainer.checkpointer.load()
        if scenario.get("save"):
            trainer.checkpointer.save(1, last_step=True)
    HuggingFaceStorageReader.read_data = original
    seen["dtypes"] = {
        name: str(p.dtype) for part in trainer.model_parts for name, p in part.named_parameters()
    }
    for part in trainer.model_parts:
        for name in ("tok_embeddings", "output"):
            if getattr(part, name) is not None:
                seen[name] = getattr(part, name).weight.detach().clone()
    if scenario["tokens"]:
        for part in trainer.model_parts:
            part.eval()
        seen["logits"] = logits_of(trainer, torch.load(scenario["tokens"]))
    trainer.close()
    torch.save(seen, folder / f"rank_{dist.get_rank()}.pt")


if __name__ == "__main__":
    run_each_scenario(run)
