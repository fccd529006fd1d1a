"""Puts peft's adapters into stages, with expected names and first values.

A weight's name in a checkpoint is the same as without adapters: ``layers.0.attention.wq.weight``.
Its adapter's two are ``layers.0.attention.wq.lora_A.default.weight`` and the same with ``lora_B``.
"""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.config import Optimizer as OptimizerConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import TrainSpec

from timelyfreeze.runtime import Exchange
from timelyfreeze.runtime.linear import ADAPTER_PLACE, Adapter
from torchtitan.lora import Lora

HEAD = "output"
_THEIRS = {
    **{f"{name}_proj": f"w{name}" for name in "qkvo"},
    **{"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3", "lm_head": HEAD},
    **{"self_attn": "attention", "mlp": "feed_forward"},
}
BASE = "base_layer."
DOWN, UP = ".lora_A.default.weight", ".lora_B.default.weight"


def linear_layers(model: nn.Module) -> list[str]:
    """Return the names of a model's linear layers."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def chosen_layers(layers: Iterable[str], targets: Sequence[str]) -> list[str]:
    """Return the ``layers`` with an adapter; all but the head without ``targets``.

    A target names a layer whole, or by the last words of its name, ours or Hugging Face's.
    """
    if not targets or "all-linear" in targets:
        return [layer for layer in layers if layer != HEAD]
    words = (target.removeprefix("model.").split(".") for target in targets)
    ends = tuple("." + ".".join(_THEIRS.get(word, word) for word in target) for target in words)
    return [layer for layer in layers if f".{layer}".endswith(ends)]


def adapter_shapes(
    model: nn.Module, layers: Iterable[str], rank: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the adapters' tensors for ``layers``, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in layers:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        shapes[name + DOWN] = rank, layer.in_features
        shapes[name + UP] = layer.out_features, rank
    return shapes


def adapter_of(weight: str) -> tuple[str, str]:
    """Return the names of both tensors of a weight's adapter: down, up."""
    layer = weight.removesuffix(".weight")
    return layer + DOWN, layer + UP


def is_adapter(name: str) -> bool:
    """Return whether a tensor of a checkpoint is an adapter's."""
    return name.endswith((DOWN, UP))


@torch.no_grad()
def merged(states: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Return a checkpoint's states without adapters, added to their weights, in float32."""
    found = {name: state for name, state in states.items() if not is_adapter(name)}
    for name in found:
        down, up = adapter_of(name)
        if up in states:
            found[name] = found[name].float() + scale * (states[up].float() @ states[down].float())
    return found


_N_SEEDS = 2**63
_COMPILED = "_orig_mod."  # what compiling a block puts into names


def add_adapters(
    part: nn.Module, settings: Lora, seed: int, autocast: torch.dtype | None = None
) -> nn.Module:
    """Freeze all weights of a stage for good and put adapters beside its linear layers.

    To be called before parallelisms are applied. The adapters get their values, from the seed and
    their names alone, in ``init_weights``, as all weights, and have the weights' type.

    Autocast caches casts of learning weights only: microbatches would all copy the frozen weights.
    So frozen weights are in autocast's type, if any, from the start.
    """
    part.requires_grad_(False)
    layers = chosen_layers(linear_layers(part), settings.targets)
    if layers:
        _inject(part, layers, settings)
        init_weights = part.init_weights

        @wraps(init_weights)
        def init(*args: Any, **kwargs: Any) -> None:
            init_weights(*args, **kwargs)
            for name, tensor in part.state_dict(keep_vars=True).items():
                if is_adapter(name):
                    _begin(name.replace(_COMPILED, ""), tensor, seed)

        part.init_weights = init
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
            down, up = module.lora_A["default"], module.lora_B["default"]
            adapter = Adapter(module.base_layer, down, up, module.scaling["default"])
            setattr(module, ADAPTER_PLACE, adapter)
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


@torch.no_grad()
def _begin(name: str, tensor: Tensor, seed: int) -> None:
    """Give an adapter's tensor peft's values, the same in all processes; zeros for the upper."""
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


def with_adapters(spec: TrainSpec, settings: Lora, seed: int) -> TrainSpec:
    """Return ``spec`` with adapters in all stages, learning at their own rate."""

    def parallelized(part: nn.Module, dims: ParallelDims, config: JobConfig) -> nn.Module:
        dtype = TORCH_DTYPE_MAP[config.training.mixed_precision_param]
        # FSDP casts by itself, whatever learns.
        casts = dtype != torch.float32 and not dims.fsdp_enabled
        add_adapters(part, settings, seed, dtype if casts else None)
        return spec.parallelize_fn(part, dims, config)

    def optimizers(parts: list[nn.Module], config: OptimizerConfig, *args: Any, **more: Any) -> Any:
        faster = replace(config, lr=settings.rate(config.lr))
        # A stage may have no layer that gets an adapter; an optimizer of nothing is an error.
        learning = [part for part in parts if any(p.requires_grad for p in part.parameters())]
        return spec.build_optimizers_fn(learning, faster, *args, **more)

    return replace(spec, parallelize_fn=parallelized, build_optimizers_fn=optimizers)


def count_trained(parts: Sequence[nn.Module], n_copies: int) -> dict[str, Any]:
    """Return ``parameters`` and ``parameters_trained`` of the whole model; nothing if equal.

    A collective call of all ranks if parts of the model are frozen for good. ``n_copies`` processes
    hold a stage, or a share of its tensors.
    """
    every = [parameter for part in parts for parameter in part.parameters()]
    trained = sum(parameter.numel() for parameter in every if parameter.requires_grad)
    held = sum(parameter.numel() for parameter in every)
    if trained == held:
        return {}
    rows = Exchange().all_gather((trained, held))
    return {
        "parameters": sum(held for _, held in rows) // n_copies,
        "parameters_trained": sum(trained for trained, _ in rows) // n_copies,
    }
