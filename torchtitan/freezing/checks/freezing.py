"""Finds methods that cannot start on the model, and adapters of another run."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torchtitan.tools.logging import logger

from timelyfreeze.files import listed
from timelyfreeze.policies import LORA, Check, FreezePolicy, build_layout, parse_method
from timelyfreeze.settings import rule_errors
from torchtitan.checkpoints.finished import changed_settings, saved_shapes
from torchtitan.freezing.values.freezing import freezing_errors
from torchtitan.freezing.values.pipeline import pipeline_errors
from torchtitan.hf.decoder import Decoder
from torchtitan.hf.flavors import LLAMA
from torchtitan.lora.adapters import (
    adapter_shapes,
    chosen_layers,
    is_adapter,
    linear_layers,
)
from torchtitan.settings import (
    JobConfig,
    pipeline_order,
    stage_modules,
)
from torchtitan.vision.spec import known_args


def method_errors(config: JobConfig) -> Iterator[str]:
    """Yield why a method whose settings are right cannot start on the model."""
    freezing = config.freezing
    if any(freezing_errors(config)) or (method := parse_method(freezing.method)) is None:
        return
    if method.plans and not isinstance(freezing.gradient_rank, str):  # of "auto" nothing is known
        _tell_of_short_sides(config, "freezing.gradient_rank", freezing.gradient_rank, ())
    if method.policy is not None:
        yield from _unfit_errors(config, getattr(freezing, method.policy))


def _unfit_errors(config: JobConfig, policy: FreezePolicy) -> Iterator[str]:
    """Yield why a policy cannot start on the model, if known before the model is built."""
    if (model := plain_model(config)) is None:
        return
    layout = build_layout({0: [(name, p.numel()) for name, p in model.named_parameters()]})
    try:
        policy.start(Check(0, layout, {}, config.freezing.seed))
    except ValueError as error:
        yield str(error)


def lora_errors(config: JobConfig) -> Iterator[str]:
    """Yield errors of a run with adapters: key, value and rule."""
    if not (config.lora.until or config.freezing.method == LORA):
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
    """Warn of layers named by ``targets`` and too narrow for a low rank."""
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
    """Yield places that need an adapter and have none.

    Upstream's optimizer wants something on each rank. Torch loses gradients of split backwards
    where the input of a stage needs none, as behind stages without learning.
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
    """Return the model without memory; None if unknown."""
    args = known_args(config) if config.model.name == LLAMA else None
    if args is None:
        return None
    with torch.device("meta"):
        return Decoder(args)


# What an adapter in a checkpoint belongs to.
_BOUND = ("freezing.method", "lora.rank", "lora.alpha", "lora.targets")


def adapter_errors(config: JobConfig, folder: Path, *, begins_anew: bool) -> Iterator[str]:
    """Yield an error for a checkpoint with other adapters, unless freezing restarts."""
    saved = {name: shape for name, shape in saved_shapes(folder).items() if is_adapter(name)}
    wanted: dict[str, tuple[int, ...]] = {}
    if config.freezing.method == LORA and (model := plain_model(config)) is not None:
        chosen = chosen_layers(linear_layers(model), config.lora.targets)
        wanted = adapter_shapes(model, chosen, config.lora.rank)
    is_new = begins_anew and not saved
    changes = changed_settings(folder, config.to_dict())
    # As long as adapters learn, what comes behind them may change.
    keys = [key for key in _BOUND[bool(wanted) :] if key in changes] if saved else []
    if is_new or (saved == wanted and not keys):
        return
    told = [f"{key} is {changes[key][1]!r} and was {changes[key][0]!r}" for key in keys]
    told = told or [f"freezing.method is {config.freezing.method!r}"]
    has = f"adapters such as {listed(sorted(saved))}" if saved else "no adapters"
    yield (
        f"{'; '.join(told)}: the checkpoint {str(folder)!r} has {has}; keep the keys that it was "
        "saved under, or begin again from what timelyfreeze export makes of it"
    )
