"""Runs several small training runs one after the other in one torchrun and writes what happened.

Usage: torchrun --nproc_per_node=N tests/multiprocess/helpers/run_scenarios.py SCENARIOS.json
    OUTPUT_FOLDER

A scenario is {"name", "args", "upstream": bool, "fixed_weights": bool, "fake_clock": bool,
"machine": what the fake clock shows, "module": name of a file in ``imported``, which is imported
first, "save_at": steps after which a checkpoint is written, "n_batches": of each replica's rows,
"keep_weights": whether to write the weights that the last step began with}. Starting processes
costs far more than these runs do, so tests that need the same number of processes share one start.
Each rank writes
OUTPUT_FOLDER/NAME/rank_R.pt with losses, gradient norms, the last step's gradients, weights, masks,
decisions and plan.
"""

import importlib
import itertools
import logging
import pickle
import zlib
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from launcher import run_each_scenario, spare_last_pause

from timelyfreeze.planning import background
from torchtitan.freezing.launch import prepare, trainer_for
from torchtitan.upstream import fixes as upstream_fixes

TINY = {"dim": 64, "n_layers": 8, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 2048}
FLAVORS = {"tiny": TINY, "short": {**TINY, "n_layers": 4}, "ten": {**TINY, "n_layers": 10}}


# What activation checkpointing and compiling put into the names of a layer's parameters.
WRAPPER, COMPILED = "_checkpoint_wrapped_module.", "_orig_mod."


def parameters_of(model_parts):
    """Return {name: parameter}, each name without what is around a layer."""
    return {
        name.replace(WRAPPER, "").replace(COMPILED, ""): parameter
        for part in model_parts
        for name, parameter in part.named_parameters()
    }


def whole(tensor):
    """Return a copy of ``tensor``, put together from its shards; None of None."""
    if tensor is None:
        return None
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def fix_weights(model_parts):
    """Give every parameter values that depend on its name alone: any split starts equal."""
    for name, parameter in parameters_of(model_parts).items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(parameter.shape, generator=generator) * 0.05
        if parameter.dim() == 1:
            values += 1.0
        if hasattr(parameter, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            values = distribute_tensor(
                values.to(parameter.dtype), parameter.device_mesh, parameter.placements
            )
        with torch.no_grad():
            parameter.copy_(values.to(parameter.dtype))


def use_fake_clock(controller, machine):
    """Replace measured times by times that depend on the action and on what it froze.

    Links between ranks take nothing then. ``machine`` may make times move: {"slow_stage": 1,
    "slow_from": step, "factor": 2.0, "saves_until": step, "spans": True}; or clocks misread in a
    step: {"misreads": {step: {action: time in ms, or None for none}}}.
    """
    recorder, stages = controller._recorder, {s.stage_index: s for s in controller.masked.stages}
    real_drain, real_batch = recorder.drain, controller.one_batch
    fractions = []  # of each pass that has not been drained

    @contextmanager
    def one_batch():
        with real_batch():
            yield
        fractions.append({index: dict(stage.applied_ratios) for index, stage in stages.items()})

    def duration_ms(action, frozen):
        step = controller.step.number
        free = {"F": 10.0, "I": 10.0, "W": 0.0, "B": 10.0}[action.kind.value]
        work = {"F": 0.0, "I": 0.0, "W": 10.0, "B": 10.0}[action.kind.value]
        if action.stage == 0 and action.kind.value == "B":
            free = 0.0
        saved = frozen if step <= machine.get("saves_until", step) else 0.0
        is_slow = action.stage == machine.get("slow_stage") and step >= machine["slow_from"]
        factor = machine["factor"] if is_slow else 1.0
        return factor * (free + work * (1.0 - saved) + 0.01 * action.microbatch)

    def drain():
        from timelyfreeze.timing.monitoring import BatchRecord

        records = []
        for record in real_drain():
            frozen = fractions.pop(0)
            durations = {
                action: duration_ms(action, frozen[action.stage].get(action.microbatch, 0.0))
                for action in record.durations_ms
            }
            misread = machine.get("misreads", {}).get(str(controller.step.number), {})
            durations |= {a: misread[str(a)] for a in durations if str(a) in misread}
            durations = {a: time_ms for a, time_ms in durations.items() if time_ms is not None}
            # Without a span there is no overhead of messages: a rank's own would tell ranks apart.
            span = sum(durations.values()) if machine.get("spans") else 0.0
            records.append(BatchRecord(durations, span))
        return records

    recorder.drain, controller.one_batch = drain, one_batch
    controller.planner.measure_transfers = dict


class SolvedInPlace:
    """A solver's process that is none: a new Python takes longer than so small a plan.

    ``test_faults.py`` and runs that are launched have the process.
    """

    returncode = 0

    def __init__(self, code, *arguments, stdin, stdout):
        function, args, kwargs = pickle.load(stdin)
        value = error = None
        try:
            value = function(*args, **kwargs)
        except Exception as problem:
            error = problem
        pickle.dump((value, error), stdout)

    def poll(self):
        return self.returncode

    def kill(self):
        """There is nothing to end, nor to wait for."""

    wait = kill


class FewBatches:
    """A loader whose rows end."""

    def __init__(self, loader, n_batches):
        self.dataset = SimpleNamespace(infinite=False)
        self._batches = itertools.islice(loader, n_batches)

    def __iter__(self):
        return self._batches


def note_starts(cache, seen):
    """Note of each batch where it begins, None for the front, and whether its rows are kept."""
    real_entry, starts = cache.entry, seen.setdefault("starts", [])

    def entry(number):
        found = real_entry(number)
        start = None if found is None or found.start is None else tuple(found.start)
        starts.append((start, found is not None and found.tapped is not None))
        seen["read_ahead"] = cache.use().read_ahead
        return found

    cache.entry = entry


def note_ahead(trainer, seen):
    """Note of each batch its step, how many stages are in front, and whether these go on."""
    ahead, found = trainer.controller.parts.ahead, seen.setdefault("ahead", [])
    real_end = ahead.end_batch

    def end_batch(microbatches=None):
        found.append((trainer.step, ahead.n_front, microbatches is not None))
        real_end(microbatches)

    ahead.end_batch = end_batch


def add_tiny_flavors():
    """Make "tiny" known, and "short" and "ten" with half its layers and with two more.

    The first trains in a blink and has a layer for each of up to eight stages.
    """
    upstream_fixes.install()
    from torchtitan.models.llama3.model.args import TransformerModelArgs

    from torchtitan.hf.flavors import EXTRA_FLAVORS

    EXTRA_FLAVORS["llama3"] |= {n: TransformerModelArgs(**args) for n, args in FLAVORS.items()}


class Told(logging.Handler):
    """Keeps the warnings of our library."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def run(scenario, folder):
    if scenario.get("module"):
        importlib.import_module(f"imported.{scenario['module']}")
    job_config = prepare([*scenario["args"], f"--job.dump_folder={folder}"])
    if scenario.get("upstream"):
        from torchtitan.protocols import train_spec
        from torchtitan.train import Trainer as Base

        train_spec._extra_train_specs.clear()
    else:
        Base = trainer_for(job_config)
    settings = getattr(Base, "keywords", {})
    Base = getattr(Base, "func", Base)
    import torchtitan.train as titan_train

    spare_last_pause(titan_train)
    seen = {
        "losses": [],
        "grad_norms": [],
        "masks": [],
        "batches": [],
        "labels": [],
        "applied": [],
        "decided": [],
    }

    class Recording(Base):
        def _shared_processors(self):
            # A plan must not depend on how many cores the machine that runs the tests has.
            return None if scenario.get("fake_clock") else super()._shared_processors()

        def forward_backward_step(self, **kwargs):
            seen["batches"].append(kwargs["input_dict"]["input"].clone())
            seen["labels"].append(kwargs["labels"].clone())
            loss = super().forward_backward_step(**kwargs)
            seen["losses"].append(float(loss))
            checks = getattr(getattr(self, "controller", None), "checks", None)
            if checks is not None:
                names = [checks.layout.names[i] for i in np.flatnonzero(checks.decision.frozen)]
                seen["decided"].append((self.step, names))
            controller = getattr(self, "controller", None)
            for stage in () if controller is None else controller.masked.stages:
                seen["applied"].append((self.step, stage.stage_index, dict(stage.applied_ratios)))
            return loss

    def keep_gradients(optimizer, *args):
        names = {p: n for n, p in parameters_of(trainer.model_parts).items()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                seen.setdefault("gradients", {})[names[parameter]] = whole(parameter.grad)
                if scenario.get("keep_weights") and trainer.step == job_config.training.steps:
                    seen.setdefault("weights_before", {})[names[parameter]] = whole(parameter)

    trainer = Recording(job_config, **settings)
    if scenario.get("fixed_weights", True):
        fix_weights(trainer.model_parts)
    if scenario.get("fake_clock"):
        use_fake_clock(trainer.controller, scenario.get("machine", {}))
    for optimizer in trainer.optimizers.optimizers:
        optimizer.register_step_pre_hook(keep_gradients)
    controller = getattr(trainer, "controller", None)
    if controller is not None:
        if controller.cache is not None:
            note_starts(controller.cache, seen)
        if controller.parts.ahead is not None:
            note_ahead(trainer, seen)
        for stage in controller.masked.stages:
            seen.setdefault("sizes", {})[stage.stage_index] = stage.parameter_sizes.tolist()
            seen.setdefault("names", {})[stage.stage_index] = list(stage.parameter_names)
            freeze = stage.freeze

            def noted(masks, freeze=freeze, stage=stage, **kwargs):
                cut = sorted(kwargs.get("without_input_grads", ()))
                seen.setdefault("cut", []).append((trainer.step, stage.stage_index, cut))
                seen["masks"].append(
                    (trainer.step, stage.stage_index, {m: v.tolist() for m, v in masks.items()})
                )
                freeze(masks, **kwargs)

            stage.freeze = noted
        real_drain = controller._recorder.drain

        def drain():
            records = real_drain()
            if records:
                seen["executed"] = [str(action) for action in records[-1].durations_ms]
            return records

        controller._recorder.drain = drain
    if "n_batches" in scenario:
        loader = trainer.dataloader
        trainer.dataloader = FewBatches(loader, scenario["n_batches"][loader.dp_rank])
    if "save_at" in scenario:
        trainer.checkpointer._should_save = lambda step, last_step=False: (
            step in scenario["save_at"]
        )
    original_log = trainer.metrics_processor.log

    def log(step, loss, max_loss, grad_norm, extra_metrics=None):
        seen["grad_norms"].append((step, grad_norm))
        original_log(step, loss, max_loss, grad_norm, extra_metrics)

    trainer.metrics_processor.log = log
    told = Told()
    logging.getLogger("timelyfreeze").addHandler(told)
    in_place = patch.object(background, "start_python", SolvedInPlace)
    with in_place if scenario.get("fake_clock") else nullcontext():
        trainer.train()
    logging.getLogger("timelyfreeze").removeHandler(told)
    seen["warnings"] = told.messages
    seen["step"] = trainer.step
    seen["n_tokens"] = trainer.ntokens_seen
    named = [name for part in trainer.model_parts for name, _ in part.named_parameters()]
    seen["recomputes"] = any(WRAPPER in name for name in named)
    seen["weights"] = {n: whole(p) for n, p in parameters_of(trainer.model_parts).items()}
    if controller is not None and controller.plan is not None:
        plan = controller.plan
        seen["plan"] = dict(zip(map(str, plan.actions), plan.ratios.tolist(), strict=True))
        links = controller.active_plan.bounds.p2p_latency_ms
        seen["p2p_latency_ms"] = {f"{a}>{b}": ms for (a, b), ms in links.items()}
        seen["message_bytes"] = {s.stage_index: s.message_bytes for s in controller.masked.stages}
    if controller is not None:
        folder_of_run = trainer.metrics_processor.recorder.run.folder
        seen["plan_files"] = sorted(path.name for path in folder_of_run.glob("plan*.json"))
        seen["switched_off"] = controller.active_plan.switched_off
        frozen, elements = controller._updates.total
        seen["frozen_elements"] = frozen, elements
        seen["average_freeze_ratio"] = frozen / max(1, elements)
    trainer.close()
    torch.save(seen, folder / f"rank_{dist.get_rank()}.pt")


if __name__ == "__main__":
    add_tiny_flavors()
    run_each_scenario(run)
