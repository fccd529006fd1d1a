"""Puts peft's adapters into a stage, and keeps the names and first values that the rest expects."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan.lora.names import BASE, DOWN, UP, chosen_layers, is_adapter, linear_layers
from torchtitan.lora.settings import Lora

_N_SEEDS = 2**63
_COMPILED = "_orig_mod."  # what compiling a block puts into names


def add_adapters(
    part: nn.Module, settings: Lora, seed: int, autocast: torch.dtype | None = None
) -> nn.Module:
    """Freeze all weights of a stage for good and put adapters beside its linear layers.

    Call it before parallelisms are applied. The adapters get their values when ``init_weights`` is
    called, as all weights do, and are of the type that weights were.

    Autocast keeps what it has cast of weights that learn, but not of others: each microbatch would
    have a copy of all frozen weights of its own. So these are in its type from the start.

    Args:
        part: A stage, or a whole model, on the meta device.
        settings: The section ``[lora]``.
        seed: Of the first values, which follow from it and an adapter's name alone.
        autocast: Type that linear layers compute in under autocast; None without autocast.

    Returns:
        The same module.
    """
    part.requires_grad_(False)
    layers = chosen_layers(linear_layers(part), settings.targets)
    if layers:
        _inject(part, layers, settings)
        part.init_weights = _then_adapters(part, part.init_weights, seed)
    for module in part.modules() if autocast is not None else ():
        if isinstance(module, nn.Linear) and not module.weight.requires_grad:
            module.to(autocast)
    return part


def _inject(part: nn.Module, layers: list[str], settings: Lora) -> None:
    # Imported late: it takes seconds, and most runs have no adapters.
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    alpha = settings.scale * settings.rank
    config = LoraConfig(r=settings.rank, lora_alpha=alpha, target_modules=layers)
    inject_adapter_in_model(config, part, low_cpu_mem_usage=True)
    for module in part.modules():
        if isinstance(module, LoraLayer):
            # Mixed precision is autocast's and FSDP's work; peft would cast to float32 before it.
            module.cast_input_dtype_enabled = False
            module.lora_A.to(module.weight.dtype)
            module.lora_B.to(module.weight.dtype)
            module.register_state_dict_post_hook(_name_as_without)
            module.register_load_state_dict_pre_hook(_name_as_within)


def _name_as_without(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Take peft's word out of the names of a layer's own tensors."""
    inner = f"{prefix}{BASE}"
    for name in [name for name in state if name.startswith(inner)]:
        state[prefix + name.removeprefix(inner)] = state.pop(name)


def _name_as_within(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Put peft's word back."""
    for name, _tensor in module.base_layer.named_parameters():
        if prefix + name in state:
            state[f"{prefix}{BASE}{name}"] = state.pop(prefix + name)


def _then_adapters(
    part: nn.Module, init_weights: Callable[..., None], seed: int
) -> Callable[..., None]:
    @wraps(init_weights)
    def init(*args: Any, **kwargs: Any) -> None:
        init_weights(*args, **kwargs)
        for name, tensor in part.state_dict(keep_vars=True).items():
            if is_adapter(name):
                _begin(name.replace(_COMPILED, ""), tensor, seed)

    return init


@torch.no_grad()
def _begin(name: str, tensor: Tensor, seed: int) -> None:
    """Give an adapter's tensor the values that peft gives it, whatever process holds it.

    What goes up begins with zeros, so that the model computes what it did without adapters.
    """
    if name.endswith(UP):
        tensor.zero_()
        return
    assert name.endswith(DOWN)
    generator = torch.Generator().manual_seed((seed + (zlib.crc32(name.encode()) << 31)) % _N_SEEDS)
    values = torch.empty(tensor.shape)
    nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
    values = values.to(tensor.device, tensor.dtype)
    if isinstance(tensor, DTensor):
        values = distribute_tensor(
            values, tensor.device_mesh, tensor.placements, src_data_rank=None
        )
    tensor.copy_(values)
