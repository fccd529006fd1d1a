"""Finds checkpoints whose adapters are not those of the run that would begin from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import nn

from timelyfreeze.policies import LORA
from torchtitan.checkpoints.finished import saved_shapes
from torchtitan.checkpoints.settings import changed_settings
from torchtitan.freezing.config import JobConfig
from torchtitan.hf.folder import some_of
from torchtitan.lora.checks.section import plain_model
from torchtitan.lora.names import adapter_shapes, chosen_layers, is_adapter, linear_layers

# What an adapter in a checkpoint belongs to.
_BOUND = ("freezing.method", "lora.rank", "lora.alpha", "lora.targets")


def adapter_errors(config: JobConfig, folder: Path, *, begins_anew: bool) -> Iterator[str]:
    """Say that a checkpoint has other adapters than the run, or has some and the run none.

    Args:
        config: Of the run.
        folder: Of the checkpoint, which is whole.
        begins_anew: Whether the run takes its weights alone; then adapters may be new.
    """
    saved = {name: shape for name, shape in saved_shapes(folder).items() if is_adapter(name)}
    wanted = _wanted(config)
    is_new = begins_anew and not saved
    changes = changed_settings(folder, config.to_dict())
    keys = [key for key in _BOUND if key in changes] if saved else []
    if is_new or (saved == wanted and not keys):
        return
    told = [f"{key} is {changes[key][1]!r} and was {changes[key][0]!r}" for key in keys]
    told = told or [f"freezing.method is {config.freezing.method!r}"]
    has = f"adapters such as {some_of(sorted(saved))}" if saved else "no adapters"
    yield (
        f"{'; '.join(told)}: the checkpoint {str(folder)!r} has {has}; keep the keys that it was "
        "saved under, or begin anew from what timelyfreeze export makes of it"
    )


def _wanted(config: JobConfig) -> dict[str, tuple[int, ...]]:
    model: nn.Module | None = plain_model(config) if config.freezing.method == LORA else None
    if model is None:
        return {}
    chosen = chosen_layers(linear_layers(model), config.lora.targets)
    return adapter_shapes(model, chosen, config.lora.rank)
