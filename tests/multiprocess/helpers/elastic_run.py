"""Runs trainings that may move to other pipelines and writes what happened.

Usage: torchrun --nproc_per_node=N tests/multiprocess/helpers/elastic_run.py SCENARIOS.json
    OUTPUT_FOLDER

A scenario is {"name", "args", "is_elastic", "module": as for ``run_scenarios.py``, "save_at": steps
after which a checkpoint is written, "resumes": whether weights are those of a checkpoint, "late":
{step: the rank that ends it once the others have given the move after it up}}. Each rank writes
OUTPUT_FOLDER/NAME/rank_R.pt with the rows and the loss of each step, its learning rate, the weights
at the end, the pipelines, the batches, of an emulated run the times of actions and the batch's by
the virtual clock, and how many of the trainers that were left are still there
when the next one is built.
"""

import gc
import importlib
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from launcher import run_each_scenario
from run_scenarios import add_tiny_flavor, fix_weights, parameters_of, whole
from torch.distributed.distributed_c10d import _get_default_store

from torchtitan.freezing.launch import prepare, trainer_for


def run(scenario, folder):
    if scenario.get("module"):
        importlib.import_module(scenario["module"])
    job_config = prepare([*scenario["args"], f"--job.dump_folder={folder}"])
    import torchtitan.train as titan_train

    from timelyfreeze.emulation import EmulatedRecorder
    from torchtitan.data.sequences import ROWS
    from torchtitan.freezing.elastic import ElasticRun
    from torchtitan.freezing.trainer import FreezingTrainer

    titan_train.time.sleep = lambda seconds: None
    seen = {"rows": [], "losses": [], "rates": [], "pipelines": [], "batches": [], "frozen": []}
    seen["n_left_over"], seen["actions"], seen["virtual_ms"] = 0, [], []
    trainers, left = [], []
    late = list(scenario.get("late", {}).items())

    def built(original):
        def build(self, config):
            seen["n_left_over"] += sum(each() is not None for each in left)
            original(self, config)
            if not trainers and not scenario.get("resumes"):
                fix_weights(self.model_parts)
            trainers.append(weakref.ref(self))
            left.extend((weakref.ref(self), weakref.ref(self.model_parts[0])))
            parallelism = config.parallelism
            seen["pipelines"].append(
                (
                    self.step,
                    parallelism.pipeline_parallel_degree,
                    self.parallel_dims.dp_shard,
                    config.training.local_batch_size,
                )
            )
            training, size = config.training, parallelism.pipeline_parallel_microbatch_size
            seen["batches"].append((size, training.local_batch_size, training.global_batch_size))
            saves = scenario.get("save_at", [])
            self.checkpointer._should_save = lambda step, last_step=False: step in saves

        return build

    real_drain = EmulatedRecorder.drain

    def drain(self):
        records = real_drain(self)
        for record in records:
            times = {str(action): ms for action, ms in record.durations_ms.items()}
            seen["actions"].append(times)
            seen["virtual_ms"].append(record.span_ms)
        return records

    real_batches, real_step = FreezingTrainer.batch_generator, FreezingTrainer.forward_backward_step
    real_close, real_continues = FreezingTrainer.close, FreezingTrainer.should_continue_training

    def batch_generator(self, loader):
        def noted():
            for inputs, labels in loader:
                seen["rows"].append((self.step, inputs[ROWS].tolist()))
                yield inputs, labels

        yield from real_batches(self, noted())

    def forward_backward_step(self, **kwargs):
        seen["rates"].append((self.step, self._learning_rate()))
        loss = real_step(self, **kwargs)
        if self.pp_has_last_stage:
            seen["losses"].append((self.step, float(loss)))
        if self.controller is not None:
            checks = self.controller.checks
            seen["frozen"].append((self.step, checks.frozen_layers))
        return loss

    def should_continue_training(self):
        for move, (step, rank) in enumerate(late):
            if (self.step, dist.get_rank()) == (int(step), rank):
                verdict = f"timelyfreeze/moves/move/{move}/verdict"
                _get_default_store().wait([verdict], timedelta(seconds=60))
        return real_continues(self)

    def close(self):
        parameters = parameters_of(self.model_parts)
        seen["weights"] = {name: whole(p) for name, p in parameters.items()}
        seen["moments"] = {
            parameter_name: {key: whole(value) for key, value in state.items()}
            for parameter_name, p in parameters.items()
            for optimizer in self.optimizers.optimizers
            if (state := optimizer.state.get(p))
        }
        seen["step"], seen["n_tokens"] = self.step, self.ntokens_seen
        if self.controller is not None:
            seen["freeze_ratio_sums"] = list(self.controller._updates.total)
            cache = self.controller.cache
            seen["cache_entered"] = 0 if cache is None else cache.use().entered
        real_close(self)

    patches = {
        "__init__": built(FreezingTrainer.__init__),
        "batch_generator": batch_generator,
        "forward_backward_step": forward_backward_step,
        "close": close,
        "should_continue_training": should_continue_training,
    }
    originals = {name: getattr(FreezingTrainer, name) for name in patches}

    for name, patch in patches.items():
        setattr(FreezingTrainer, name, patch)
    EmulatedRecorder.drain = drain
    try:
        trainer = (
            ElasticRun(FreezingTrainer, job_config)
            if scenario["is_elastic"]
            else trainer_for(job_config)(job_config)
        )
        trainer.train()
        trainer.close()
        gc.collect()
        seen["n_left_over"] += sum(each() is not None for each in trainers[:-1])
    finally:
        for name, original in originals.items():
            setattr(FreezingTrainer, name, original)
        EmulatedRecorder.drain = real_drain
    torch.save(seen, folder / f"rank_{dist.get_rank()}.pt")


if __name__ == "__main__":
    add_tiny_flavor()
    run_each_scenario(run)
