"""Runs trainings that may move to other pipelines and writes what happened.

Usage: torchrun --nproc_per_node=N tests/multiprocess/helpers/elastic_run.py SCENARIOS.json
    OUTPUT_FOLDER

A scenario is {"name", "args", "is_elastic", "save_at": steps after which a checkpoint is written,
"fake_clock": whether times depend on actions and on what they froze alone, "module": as in
``run_scenarios.py``, "front": for how many frozen layers the pipeline is that it begins in,
"resumes": whether weights are those of a checkpoint, "late": {step: the rank that ends it once
the others have given the move after it up}, "seconds": {"ranks microbatches": what a step takes on
each rank, where numbers of microbatches are tried}}. Each rank writes
OUTPUT_FOLDER/NAME/rank_R.pt with the rows and the loss of each step, its learning rate, its inputs,
the weights at the end, the pipelines, their layers, the batches, of an emulated run the times of
actions and the batch's by the virtual clock, phases and masks of steps, the last plan of each
pipeline, and how many of the trainers that were left are still there when the next one is built.
"""

import gc
import importlib
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from launcher import run_each_scenario, spare_last_pause
from run_scenarios import add_tiny_flavors, fix_weights, parameters_of, use_fake_clock, whole
from torch.distributed.distributed_c10d import _get_default_store

from torchtitan.freezing.launch import prepare, trainer_for


def run(scenario, folder):
    if scenario.get("module"):
        importlib.import_module(f"imported.{scenario['module']}")
    job_config = prepare([*scenario["args"], f"--job.dump_folder={folder}"])
    import torchtitan.train as titan_train

    from timelyfreeze.control import EmulatedRecorder
    from timelyfreeze.control.build import highest_learning_rate
    from torchtitan.freezing.elastic.pipeline import MicrobatchSearch, pipeline_for
    from torchtitan.freezing.elastic.run import ElasticRun
    from torchtitan.freezing.partition.cut import count_model_layers
    from torchtitan.freezing.trainer import FreezingTrainer
    from torchtitan.settings import count_layers, cuts_blocks, stage_modules

    spare_last_pause(titan_train)
    if scenario.get("front"):
        job_config = pipeline_for(job_config, scenario["front"]).moved(job_config)
    seen = {"rows": [], "losses": [], "rates": [], "pipelines": [], "batches": [], "frozen": []}
    seen["splits"], seen["halves"] = [], []
    seen["n_left_over"], seen["actions"], seen["virtual_ms"] = 0, [], []
    seen |= {"phases": [], "masks": [], "plans": [], "inputs": [], "labels": []}
    trainers, left = [], []
    late = list(scenario.get("late", {}).items())

    def built(original):
        def build(self, config, *args, **kwargs):
            seen["n_left_over"] += sum(each() is not None for each in left)
            original(self, config, *args, **kwargs)
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
            seen["splits"].append(
                list(count_layers(stage_modules(config, count_model_layers(config))))
            )
            seen["halves"].append(cuts_blocks(config))
            training, size = config.training, parallelism.pipeline_parallel_microbatch_size
            seen["batches"].append((size, training.local_batch_size, training.global_batch_size))
            if scenario.get("fake_clock") and self.controller is not None:
                use_fake_clock(self.controller, {})
                note_masks(self)
            saves = scenario.get("save_at", [])
            self.checkpointer._should_save = lambda step, last_step=False: step in saves

        return build

    def note_masks(trainer):
        for stage in trainer.controller.masked.stages:

            def noted(masks, stage=stage, freeze=stage.freeze, **kwargs):
                of_stage = {m: mask.tolist() for m, mask in masks.items()}
                seen["masks"].append((trainer.step, (stage.stage_index, of_stage)))
                freeze(masks, **kwargs)

            stage.freeze = noted

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
                seen["rows"].append((self.step, inputs.rows.tolist()))
                yield inputs, labels

        yield from real_batches(self, noted())

    def forward_backward_step(self, **kwargs):
        seen["rates"].append((self.step, highest_learning_rate(self.optimizers.optimizers)))
        seen["inputs"].append(kwargs["input_dict"]["input"].clone())
        seen["labels"].append(kwargs["labels"].clone())
        loss = real_step(self, **kwargs)
        if not self.parallel_dims.pp_enabled or self.pp_has_last_stage:
            seen["losses"].append((self.step, float(loss)))
        if self.controller is not None:
            if (checks := self.controller.checks) is not None:
                seen["frozen"].append((self.step, checks.frozen_layers))
            seen["phases"].append((self.step, self.controller.step.phase.value))
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
            if (plan := self.controller.plan) is not None:
                ratios = map(str, plan.actions), plan.ratios.tolist()
                seen["plans"].append(dict(zip(*ratios, strict=True)))
            seen["freeze_ratio_sums"] = list(self.controller._updates.total)
            cache = self.controller.cache
            seen["cache_entered"] = 0 if cache is None else cache.use().entered
        real_close(self)

    real_after_step = MicrobatchSearch.after_step

    def after_step(self, pipeline, seconds):
        n_microbatches = self._rows(pipeline) // (pipeline.microbatch or 1)
        of_ranks = scenario["seconds"][f"{len(pipeline.split)} {n_microbatches}"]
        return real_after_step(self, pipeline, of_ranks[dist.get_rank()])

    patches = {
        "__init__": built(FreezingTrainer.__init__),
        "batch_generator": batch_generator,
        "forward_backward_step": forward_backward_step,
        "close": close,
        "should_continue_training": should_continue_training,
    }
    if scenario.get("fake_clock"):
        # A plan must not depend on how many cores the machine that runs the tests has.
        patches["_shared_processors"] = lambda self: None
    originals = {name: getattr(FreezingTrainer, name) for name in patches}

    for name, patch in patches.items():
        setattr(FreezingTrainer, name, patch)
    EmulatedRecorder.drain = drain
    MicrobatchSearch.after_step = after_step
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
        MicrobatchSearch.after_step = real_after_step
    torch.save(seen, folder / f"rank_{dist.get_rank()}.pt")


if __name__ == "__main__":
    add_tiny_flavors()
    run_each_scenario(run)
