"""Finds errors in what is frozen: phases without room, adapters that are not those of the run."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torchtitan.tools.logging import logger

from timelyfreeze.files import listed
from timelyfreeze.policies import (
    LORA,
    Check,
    FreezePolicy,
    build_layout,
    freezes_by_turns,
    parse_method,
)
from timelyfreeze.runtime import stages_per_rank
from timelyfreeze.settings import AUTO, FreezeSettings, rule_errors
from torchtitan.checkpoints.finished import changed_settings, saved_shapes
from torchtitan.freezing.checks.pipeline import pipeline_errors
from torchtitan.hf.decoder import Decoder
from torchtitan.hf.flavors import LLAMA
from torchtitan.lora.adapters import (
    adapter_shapes,
    chosen_layers,
    is_adapter,
    linear_layers,
)
from torchtitan.settings import (
    Freezing,
    JobConfig,
    global_rows,
    pipeline_order,
    preset_errors,
    stage_modules,
)
from torchtitan.vision.spec import known_args

# Upstream sets the second one after step 1. A run that resumes at a later step keeps the first.
_WAITS = ("train_timeout_seconds", "init_timeout_seconds")


def freeze_settings(freezing: Freezing) -> FreezeSettings:
    """Return the checked ``[freezing]`` section as the library wants it."""
    method = parse_method(freezing.method)
    return freezing if method is None or method.plans else freezing.unplanned


def freezing_errors(config: JobConfig) -> Iterator[str]:
    """Yield what is wrong with ``[freezing]``: key, value and rule."""
    freezing = config.freezing
    try:
        method = parse_method(freezing.method)
    except ValueError as error:
        yield str(error)
        return
    if method is None:
        return
    # What "auto" stands for is found once the rest is right.
    is_auto = freezing.gradient_rank == AUTO
    known: FreezeSettings = replace(freezing, gradient_rank=0) if is_auto else freezing
    settings = list(known.errors(plans=method.plans, n_stages=_n_stages(config)))
    yield from settings
    yield from _last_step_errors(config, plans=method.plans)
    if method.plans:
        yield from _solver_errors(config)
        _tell_of_short_sides(config, "freezing.gradient_rank", known.gradient_rank, ())
    if method.policy is not None:
        policy: FreezePolicy = getattr(freezing, method.policy)
        errors = list(policy.errors())
        yield from errors
        if not (settings or errors):
            yield from _unfit_errors(config, policy)
    yield from preset_errors(config, given=())  # contradictions are told where it was read


def _unfit_errors(config: JobConfig, policy: FreezePolicy) -> Iterator[str]:
    """Yield why a policy cannot start on the model, where that is known before it is built."""
    if (model := plain_model(config)) is None:
        return
    layout = build_layout({0: [(name, p.numel()) for name, p in model.named_parameters()]})
    try:
        policy.start(Check(0, layout, {}, config.freezing.seed))
    except ValueError as error:
        yield str(error)


def _n_stages(config: JobConfig) -> int | None:
    """Return how many stages the pipeline will have, where the configuration alone tells."""
    parallelism = config.parallelism
    if parallelism.module_fqns_per_model_part is not None:
        return len(parallelism.module_fqns_per_model_part)
    if parallelism.pipeline_parallel_layers_per_stage is not None:
        return None
    per_rank = stages_per_rank(parallelism.pipeline_parallel_schedule)
    return None if per_rank is None else per_rank * parallelism.pipeline_parallel_degree


def _last_step_errors(config: JobConfig, *, plans: bool) -> Iterator[str]:
    """Yield which step lies behind the end of the run."""
    freezing, n_steps = config.freezing, config.training.steps
    name = "last_monitor_step" if plans else "last_warmup_step"
    if (last := getattr(freezing, name)) >= n_steps:
        yield (
            f"freezing.{name} is {last}; it must lie before training.steps ({n_steps}), or nothing "
            "is ever frozen"
        )
    due = freezing.last_monitor_step + (delay := freezing.solver_delay_steps or 0)
    if plans and delay > 0 and due >= n_steps:
        yield (
            f"freezing.solver_delay_steps is {delay}; the plan would come at step {due}, which "
            f"must lie before training.steps ({n_steps})"
        )


def _solver_errors(config: JobConfig) -> Iterator[str]:
    """Yield what is wrong with the limits of a method that plans.

    One rank solves; once the plan is due, the others wait for it in a collective. Where that ended
    first, a solver that takes long would end the run, instead of costing its plan.
    """
    limit_s, comm = config.freezing.solver_time_limit_s, config.comm
    if config.emulation.enable or comm.mode != "default":
        return  # nobody waits for another process
    for name in _WAITS:
        if limit_s >= getattr(comm, name):
            yield (
                f"freezing.solver_time_limit_s is {limit_s}; it must be below comm.{name} "
                f"({getattr(comm, name)}), for which the other ranks wait for the plan: raise that "
                "one or lower this one"
            )


def caches(config: JobConfig) -> bool:
    """Return whether outputs of a frozen front are to be kept; not where nothing is frozen."""
    return config.freezing.cache.enable and freezes_by_turns(config.freezing.method)


def front_errors(config: JobConfig) -> Iterator[str]:
    """Yield which numbers and words make no sense for a front that is frozen."""
    freezing = config.freezing
    if not freezes_by_turns(freezing.method):
        return
    for section in (freezing.cache, freezing.elastic):
        if section.enable:
            yield from section.errors()
    limit_s, timeout_s = freezing.elastic.join_limit_s, config.comm.init_timeout_seconds
    joins = freezing.elastic.enable or (freezing.packing.is_on and not freezing.packing.gives_back)
    # A move could not be given up: messages from before it would be, first.
    if joins and not 0.0 < limit_s < timeout_s:
        yield (
            f"freezing.elastic.join_limit_s is {limit_s}; it must be above 0 and below "
            f"comm.init_timeout_seconds ({timeout_s}), after which ranks fail that wait for another"
        )
    if freezing.packing.is_on:
        yield from freezing.packing.errors()
    most, rows = freezing.packing.max_global_batch, global_rows(config)
    if freezing.packing.is_on and 0 < most < rows:
        yield (
            f"freezing.packing.max_global_batch is {most}; it must be 0, or at least "
            f"training.global_batch_size ({rows})"
        )


def lora_errors(config: JobConfig) -> Iterator[str]:
    """Yield what is wrong with a run with adapters: key, value and rule."""
    if config.freezing.method != LORA:
        return
    yield from rule_errors(config.freezing)
    model = plain_model(config)
    if model is None:
        return  # told by model_errors
    layers, targets = linear_layers(model), config.lora.targets
    unknown = [target for target in targets if not chosen_layers(layers, [target])]
    for target in unknown:
        words = dict.fromkeys(layer.rpartition(".")[2] for layer in layers)
        yield (
            f"lora.targets has {target!r}, which is no linear layer of model.flavor "
            f"{config.model.flavor!r}; there are {', '.join(words)}"
        )
    _tell_of_short_sides(config, "lora.rank", config.lora.rank, targets)
    is_alone = config.parallelism.pipeline_parallel_degree <= 1
    if unknown or is_alone or any(pipeline_errors(config)):
        return
    try:
        stages = stage_modules(config, len(model.layers))
        ranks = pipeline_order(config, len(model.layers)).stage_to_rank
    except ValueError:
        return  # told by model_errors
    yield from _place_errors(stages, ranks, chosen_layers(layers, targets))


def _tell_of_short_sides(
    config: JobConfig, key: str, ranks: int | list[int], targets: Sequence[str]
) -> None:
    """Warn of layers that are not wide enough for a rank to be low, those ``targets`` name."""
    rank = max(ranks, default=0) if isinstance(ranks, list) else ranks
    if rank <= 0 or (model := plain_model(config)) is None:
        return
    layers = chosen_layers(linear_layers(model), targets)
    sides = {name: min(model.get_submodule(name).weight.shape) for name in layers}
    if short := [f"{name} ({side})" for name, side in sides.items() if side < rank]:
        logger.warning(f"{key} is {ranks}, above the shorter side of {listed(short)}")


def _place_errors(
    stages: Sequence[Sequence[str]], ranks: Sequence[int], chosen: Sequence[str]
) -> Iterator[str]:
    """Say where no adapter is though there must be one.

    Upstream's optimizer wants something on each rank. Torch loses gradients of a backward that is
    split where the input of a stage needs none, as behind stages that learn nothing.
    """
    places = {"stage 0": stages[0]}
    for rank in sorted(set(ranks)):
        held = zip(stages, ranks, strict=True)
        places[f"rank {rank}"] = [name for names, of in held if of == rank for name in names]
    for place, modules in places.items():
        parts = tuple(f"{module}." for module in modules)
        if not any(layer.startswith(parts) or layer in modules for layer in chosen):
            yield (
                f"lora.targets names no layer of {place} ({', '.join(modules)}); the first stage "
                "and each rank need one that learns: name more layers, or cut the model otherwise"
            )


def plain_model(config: JobConfig) -> Any:
    """Return the model without memory; None where it is not known."""
    args = known_args(config) if config.model.name == LLAMA else None
    if args is None:
        return None
    with torch.device("meta"):
        return Decoder(args)


# What an adapter in a checkpoint belongs to.
_BOUND = ("freezing.method", "lora.rank", "lora.alpha", "lora.targets")


def adapter_errors(config: JobConfig, folder: Path, *, begins_anew: bool) -> Iterator[str]:
    """Say that a checkpoint has other adapters than the run, unless freezing restarts."""
    saved = {name: shape for name, shape in saved_shapes(folder).items() if is_adapter(name)}
    wanted: dict[str, tuple[int, ...]] = {}
    if config.freezing.method == LORA and (model := plain_model(config)) is not None:
        chosen = chosen_layers(linear_layers(model), config.lora.targets)
        wanted = adapter_shapes(model, chosen, config.lora.rank)
    is_new = begins_anew and not saved
    changes = changed_settings(folder, config.to_dict())
    keys = [key for key in _BOUND if key in changes] if saved else []
    if is_new or (saved == wanted and not keys):
        return
    told = [f"{key} is {changes[key][1]!r} and was {changes[key][0]!r}" for key in keys]
    told = told or [f"freezing.method is {config.freezing.method!r}"]
    has = f"adapters such as {listed(sorted(saved))}" if saved else "no adapters"
    yield (
        f"{'; '.join(told)}: the checkpoint {str(folder)!r} has {has}; keep the keys that it was "
        "saved under, or begin again from what timelyfreeze export makes of it"
    )
