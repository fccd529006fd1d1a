"""Finds settings under which a run cannot go on from a checkpoint: it holds what belongs to others.

What else differs is logged where the checkpoint is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torchtitan.protocols.train_spec import get_train_spec

from timelyfreeze.files import shown
from timelyfreeze.policies import parse_method
from torchtitan.checkpoints.finished import saved_shapes, saved_values
from torchtitan.checkpoints.settings import changed_settings
from torchtitan.data.rows.kinds import is_instruct_dataset
from torchtitan.freezing.config import JobConfig
from torchtitan.hf.flavors import chosen_args

_STEP = "train_state.step"
_MODEL = ("model.name", "model.flavor", "model.vocab_size", "model.hf_assets_path")
_PATH = "training.dataset_path"
_DATA = ("training.dataset", _PATH)
_ORDER = ("data.shuffle", "data.seed", "data.validation_fraction", "data.packing")
_PACKED = ("data.packing", "data.chat_template", "training.seq_len")
# A checkpoint brings them along with the state of the optimizer.
_OPTIMIZER = ("name", "beta1", "beta2", "eps", "weight_decay", "implementation")
# What times were measured under, and what a plan is for.
_PLAN = (
    "freezing.last_warmup_step",
    "freezing.last_monitor_step",
    "freezing.monitoring",
    "freezing.discard_batches",
    "freezing.max_freeze_ratio",
    "freezing.first_stage",
    "freezing.skip_input_grads",
    "parallelism.pipeline_parallel_schedule",
    "parallelism.pipeline_parallel_schedule_csv",
)

_Changes = Mapping[str, tuple[Any, Any]]


def resuming_errors(config: JobConfig, folder: Path) -> Iterator[str]:
    """Say which keys a checkpoint's states do not go together with, each with both values.

    Args:
        config: Of the run that is to go on.
        folder: Of the checkpoint, which is whole.
    """
    changes = changed_settings(folder, config.to_dict())
    if not changes:
        return
    excluded = config.checkpoint.exclude_from_loading
    for states, keys in _bound_keys(config, folder, changes):
        wrong = [_told(key, *changes[key]) for key in keys if key in changes]
        if wrong and not set(states) <= set(excluded):
            names = ", ".join(f'"{name}"' for name in sorted({*excluded, *states}))
            yield (
                f"{'; '.join(wrong)}: the checkpoint {str(folder)!r} goes on with the same only; "
                f"keep it, or begin that anew with checkpoint.exclude_from_loading = [{names}]"
            )


def _bound_keys(
    config: JobConfig, folder: Path, changes: _Changes
) -> Iterator[tuple[Collection[str], list[str]]]:
    """Yield states of a checkpoint, and the keys that must be as they were to load one of them."""
    yield ("optimizer", "lr_scheduler"), ["optimizer.lr", "lora.learning_rate"]
    yield ("optimizer",), [f"optimizer.{name}" for name in _OPTIMIZER]
    yield (
        ("dataloader",),
        [
            *(
                key
                for key in _DATA
                if key != _PATH or _is_elsewhere(*changes.get(key, (None, None)))
            ),
            *(_ORDER if is_instruct_dataset(config.training.dataset) else ()),
            *(_PACKED if config.data.packing else ()),
        ],
    )
    method = parse_method(config.freezing.method)
    if method is None:
        return
    freezing = ["freezing.method"]
    if method.policy is not None:
        freezing += [key for key in changes if key.startswith(f"freezing.{method.policy}.")]
    if method.plans and _measured(config, folder, changes):
        freezing += _PLAN
    yield ("freezing",), freezing


def _measured(config: JobConfig, folder: Path, changes: _Changes) -> bool:
    """Return whether times were measured before the checkpoint, or would have been by now."""
    key = "freezing.last_warmup_step"
    then, now = changes.get(key, (config.freezing.last_warmup_step,) * 2)
    step = saved_values(folder, [_STEP]).get(_STEP, 0)
    return bool(step > min(then, now))


def _is_elsewhere(then: str | None, now: str | None) -> bool:
    return None in (then, now) or os.path.realpath(str(then)) != os.path.realpath(str(now))


def _told(key: str, then: Any, now: Any) -> str:
    return f"{key} is {shown(now)} and was {shown(then)}"


def weights_errors(config: JobConfig, folder: Path) -> Iterator[str]:
    """Say that the weights of a checkpoint are those of another model."""
    saved, wanted = saved_shapes(folder), _model_shapes(config)
    if not (saved and wanted):
        return  # Hugging Face's files, or a model that upstream alone knows how to build
    unlike = _unlike(saved, wanted)
    if unlike is None:
        return
    changes = changed_settings(folder, config.to_dict())
    keys = [_told(key, *changes[key]) for key in _MODEL if key in changes]
    yield (
        f"{'; '.join(keys) or f'model.flavor is {config.model.flavor!r}'}: the checkpoint "
        f"{str(folder)!r} belongs to another model: {unlike}; keep the model, or begin anew in "
        "another checkpoint.folder"
    )


def _model_shapes(config: JobConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of the model by its name, none where that is not known."""
    try:
        spec = get_train_spec(config.model.name)
        args = chosen_args(config, spec.model_args)
    except (ImportError, ValueError):
        return {}  # told by those that check models
    if not hasattr(args, "n_layers"):
        return {}
    args.update_from_config(config)
    with torch.device("meta"):
        weights = spec.model_cls(args).state_dict()
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def _unlike(
    saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> str | None:
    layers = [
        len({n.split(".")[1] for n in of if n.startswith("layers.")}) for of in (saved, wanted)
    ]
    if layers[0] != layers[1]:
        return f"it has {layers[0]} layers, this model {layers[1]}"
    for name, shape in wanted.items():
        if saved.get(name) != shape:
            there = f"is {list(saved[name])}" if name in saved else "is missing"
            return f"{name} {there} there, {list(shape)} in this model"
    return None
