"""A profile: stages of a configuration timed alone on this device, and its files.

A model too large for a device is profiled stage by stage, cut on the meta device, with memory for a
single stage. There is no optimizer. The files have bounds as of a training run, and responses to
freezing.
"""

import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils as titan_tools
from torchtitan.protocols.train_spec import TrainSpec
from torchtitan.tools.logging import logger

from timelyfreeze.schedule import ActionKind, PipelineDag, ScheduleOrder, build_dag
from timelyfreeze.settings import (
    ALL_OR_NOTHING,
    arguments_named,
    first_stage_mode,
    rule_errors,
)
from timelyfreeze.timing import DurationBounds, bounds_from_samples, shared_cores, usable_cores
from timelyfreeze.whatif.bounds_file import bounds_file_text
from timelyfreeze.whatif.layer_model import layer_overheads
from timelyfreeze.whatif.times import Pair, StageTimes, complete_times
from torchtitan.data.sequences import IGNORE_INDEX
from torchtitan.freezing.checks import PROFILE, SPLIT, feature_errors
from torchtitan.freezing.partition.cut import model_sizes
from torchtitan.freezing.profile.bench import Bench, Repeats, Response, fit_line, spread
from torchtitan.freezing.spec import build_train_spec
from torchtitan.freezing.values.rules import size_errors
from torchtitan.hf.decoder import learns_alone
from torchtitan.settings import (
    JobConfig,
    count_layers,
    pipeline_metadata,
    pipeline_order,
    stage_modules,
    toml_key,
)
from torchtitan.vision.spec import base_spec


@dataclass(frozen=True)
class Profile:
    """Measurements of a configuration."""

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
    """Measure every stage, and the cost of a layer; ``report`` gets responses at once."""
    with arguments_named(toml_key):
        reasons = [
            *size_errors(job_config),
            *feature_errors(job_config, (PROFILE, SPLIT)),
            *rule_errors(job_config.freezing),
        ]
    if reasons:
        raise ValueError("; ".join(reasons))
    spec = build_train_spec(base_spec(job_config), job_config)
    model_args: Any = spec.model_args[job_config.model.flavor]
    if reasons := list(_model_not_covered(job_config, model_args)):
        raise ValueError("; ".join(reasons))
    model_args.update_from_config(job_config)
    modules = stage_modules(job_config, model_args.n_layers)
    order = pipeline_order(job_config, model_args.n_layers)
    # Full, and split where that works.
    splits = (False, True) if job_config.activation_checkpoint.mode == "none" else (False,)
    with quiet_process(job_config):
        share = _learned_share(job_config, spec)
        bench = Bench(job_config, spec, model_args, repeats, splits, report, share)
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


def _model_not_covered(config: JobConfig, model_args: Any) -> Iterator[str]:
    """Yield why a model's stages cannot be profiled."""
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


def _learned_share(config: JobConfig, spec: TrainSpec) -> float | None:
    """Return the learned share of tokens in the run's first batch; None if the head gets all."""
    if not learns_alone(config, spec.model_args[config.model.flavor]):
        return None
    assert spec.build_tokenizer_fn is not None
    place = {"dp_world_size": 1, "dp_rank": 0, "job_config": config}
    try:
        tokenizer = spec.build_tokenizer_fn(config)
        _, labels = next(iter(spec.build_dataloader_fn(tokenizer=tokenizer, **place)))
    except (OSError, ValueError) as error:
        logger.warning(f"The head is timed with every token learned, for lack of data: {error}")
        return 1.0
    share = float((labels != IGNORE_INDEX).double().mean())
    logger.info(f"The head is timed with {share:.0%} of the tokens, those that a batch learns")
    return share


@contextmanager
def quiet_process(config: JobConfig) -> Iterator[None]:
    """Give this process a group of its own, and a rank's number of threads."""
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


def chosen_responses(profile: Profile, first_stage: str) -> list[Response]:
    """Return a response per stage, for the first stage by its way of freezing."""
    return [r for r in profile.responses if r.first_stage in (None, first_stage)]


def profile_bounds(
    profile: Profile, first_stage: str = ALL_OR_NOTHING
) -> tuple[PipelineDag, DurationBounds]:
    """Return the profiled schedule's graph, and bounds as of a run, without messages."""
    dag = build_dag(profile.order)
    stages = chosen_responses(profile, first_stage)
    samples = {action: stages[action.stage].ends(action.kind) for action in dag.actions}
    unfrozen = {action: high for action, (_, high) in samples.items()}
    frozen = {action: low for action, (low, _) in samples.items()}
    return dag, bounds_from_samples(dag, unfrozen, frozen)


def stage_times(response: Response) -> StageTimes:
    """Return the medians of a stage as times of its actions, whatever the schedule."""
    pairs: dict[ActionKind, Pair] = {}
    halves = [ActionKind.INPUT_BACKWARD] if response.input_ms else []
    for kind in [ActionKind.FORWARD, *response.curves, *halves]:
        low, high = (spread(times)["median_ms"] for times in response.ends(kind))
        pairs[kind] = (min(low, high), high)  # no faster frozen: as ``bounds_from_samples``
    return complete_times(pairs, is_first=response.stage == 0)


def profile_overheads(profile: Profile) -> tuple[StageTimes, StageTimes]:
    """Return the times of a layer and of an empty stage; a ValueError if two sizes contradict."""
    one, many = profile.probes
    return layer_overheads(stage_times(one), stage_times(many), many.n_layers)


def bounds_text(
    profile: Profile, job_config: JobConfig, overheads: tuple[StageTimes, StageTimes] | None
) -> str:
    """Return the bounds file, with all data for plans of other pipelines."""
    freezing = job_config.freezing
    first_stage = first_stage_mode(freezing.first_stage, max(freezing.gradient_ranks))
    dag, bounds = profile_bounds(profile, first_stage)
    sizes, (layer, fixed) = model_sizes(job_config), overheads or (None, None)
    of_run = pipeline_metadata(
        job_config, profile.order, profile.n_layers, profile.n_processors, sizes
    )
    stages = tuple(stage_times(r) for r in chosen_responses(profile, first_stage))
    notes = replace(of_run, stages=stages, layer=layer, fixed=fixed)
    return bounds_file_text(dag, bounds, notes)


def response_text(profile: Profile, repeats: Repeats, about: Mapping[str, Any]) -> str:
    """Return facts on the profile, all points with their spread, and the lines, as JSON."""
    plain = {
        **about,
        "cold_rounds": repeats.cold,
        "kept_rounds": repeats.kept,
        "peak_gib_by_stage": [None if peak < 0 else peak / 1024**3 for peak in profile.peak_bytes],
        "stages": [_plain(response) for response in profile.responses],
        "probes": [_plain(response) for response in profile.probes],
    }
    return json.dumps(plain, indent=2) + "\n"


def _plain(response: Response) -> dict[str, Any]:
    return {
        "stage": response.stage,
        "n_layers": response.n_layers,
        "first_stage": response.first_stage,
        "forward": spread(response.forward_ms),
        "input": spread(response.input_ms) if response.input_ms else None,
        "curves": {
            kind.value: {
                "line": asdict(fit_line(points)),
                "points": [
                    {"ratio": p.ratio, "fraction": p.fraction, **spread(p.times_ms)} for p in points
                ],
            }
            for kind, points in response.curves.items()
        },
    }


HEADING = (
    "stage", "layers", "F", "I", "action", "unfrozen", "frozen", "farthest from line", "R2"
)  # fmt: skip


def table_rows(response: Response) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a response below ``HEADING``, milliseconds."""
    name = "probe" if response.stage is None else str(response.stage)
    if response.first_stage is not None:
        name += f" {response.first_stage}"
    for kind, points in response.curves.items():
        line = fit_line(points)
        miss = f"{line.largest_miss_ms:+.2f} ({line.largest_miss:+.1%})"
        yield (
            name,
            str(response.n_layers),
            f"{spread(response.forward_ms)['median_ms']:.2f}",
            f"{spread(response.input_ms)['median_ms']:.2f}" if response.input_ms else "",
            kind.value,
            f"{line.unfrozen_ms:.2f}",
            f"{line.frozen_ms:.2f}",
            "two points" if len(points) == 2 else miss,
            f"{line.r_squared:.4f}",
        )
