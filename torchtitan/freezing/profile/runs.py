"""Times every stage of a configuration alone on this device, one after the other.

A model that no device could hold is profiled stage by stage: it is cut on the meta device, and only
the stage at hand gets memory. There is no optimizer.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils as titan_tools

from timelyfreeze.schedule import ScheduleOrder
from timelyfreeze.settings import arguments_named, unknown_words
from timelyfreeze.timing import shared_cores, usable_cores
from torchtitan.freezing.checks import PROFILE, SPLIT, feature_errors, schedule_errors, size_errors
from torchtitan.freezing.config import JobConfig, count_layers, stage_modules, toml_key
from torchtitan.freezing.emulation.pipeline import emulated_order
from torchtitan.freezing.profile.bench import Bench, Repeats, Response
from torchtitan.freezing.spec import build_train_spec
from torchtitan.vision.spec import base_spec


@dataclass(frozen=True)
class Profile:
    """What was measured of a configuration."""

    order: ScheduleOrder  # the schedule of the configuration
    n_layers: int  # layers of the model
    # of each stage; two of the first stage, one for each way to freeze it
    responses: tuple[Response, ...]
    # of stages in the middle with 1 layer and with more, which tell what a layer takes
    probes: tuple[Response, Response]
    # the most that the device's allocator held, by stage; -1 where it tells none
    peak_bytes: tuple[int, ...]
    # How many ranks of a run on this host would compute at once; None if each has a device, or
    # cores, of its own.
    n_processors: float | None = None


def profile_stages(
    job_config: JobConfig, repeats: Repeats, report: Callable[[Response], None]
) -> Profile:
    """Measure every stage, and what a layer adds to one; ``report`` gets each response at once."""
    with arguments_named(toml_key):
        reasons = list(_not_covered(job_config))
    if reasons:
        raise ValueError("; ".join(reasons))
    spec = build_train_spec(base_spec(job_config), job_config)
    model_args: Any = spec.model_args[job_config.model.flavor]
    if reasons := list(_model_not_covered(job_config, model_args)):
        raise ValueError("; ".join(reasons))
    model_args.update_from_config(job_config)
    modules = stage_modules(job_config, model_args.n_layers)
    order = emulated_order(job_config, model_args.n_layers)
    # Full, and split where that works.
    splits = (False, True) if job_config.activation_checkpoint.mode == "none" else (False,)
    with _quiet_process(job_config):
        bench = Bench(job_config, spec, model_args, repeats, splits, report)
        last = len(modules) - 1
        stages = [
            bench.measure(names, i, is_first=i == 0, is_last=i == last)
            for i, names in enumerate(modules)
        ]
        responses = [response for measured, _ in stages for response in measured]
        middle = [r for r in responses if r.stage in range(1, last) and r.n_layers > 1]
        many = middle[0] if middle else bench.probe(max(2, *count_layers(modules)))
        probes = (bench.probe(1), many)
        n_processors = None
        if titan_tools.device_type == "cpu":
            n_processors = shared_cores(order.n_ranks, torch.get_num_threads())
    return Profile(
        order=order,
        n_layers=model_args.n_layers,
        responses=tuple(responses),
        probes=probes,
        peak_bytes=tuple(peak_bytes for _, peak_bytes in stages),
        n_processors=n_processors,
    )


def _not_covered(config: JobConfig) -> Iterator[str]:
    """Say what about a configuration keeps its stages from being profiled."""
    yield from size_errors(config)
    yield from schedule_errors(config)
    yield from feature_errors(config, (PROFILE, SPLIT))
    yield from unknown_words(first_stage=config.freezing.first_stage)


def _model_not_covered(config: JobConfig, model_args: Any) -> Iterator[str]:
    """Say the same about the model that it asks for."""
    for name in ("n_layers", "dim", "vocab_size"):
        if not hasattr(model_args, name):
            yield (
                f"model.name is {config.model.name!r}, whose description has no {name}; profiled "
                "are language models of layers that are alike"
            )
    attention = getattr(model_args, "attn_type", "sdpa")
    if attention != "sdpa":
        yield (
            f"model.flavor {config.model.flavor!r} has {attention} attention, whose masks come "
            "from the data; choose a flavor with sdpa"
        )


@contextmanager
def _quiet_process(config: JobConfig) -> Iterator[None]:
    """Give this process a group of its own, and the threads that a rank would have."""
    n_threads = torch.get_num_threads()
    if titan_tools.device_type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        # As run_train.sh does for a host that has all ranks.
        n_ranks = config.parallelism.pipeline_parallel_degree
        torch.set_num_threads(max(1, int(usable_cores()) // n_ranks))
    alone = not dist.is_initialized()
    if alone:
        # No message is ever sent: all stages are in this process.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gc.collect()
    gc.disable()  # as the trainer does
    try:
        yield
    finally:
        gc.enable()
        if alone:
            dist.destroy_process_group()
        torch.set_num_threads(n_threads)
