"""A copy of a block without what parallelisms have put around it, with weights of its own.

FSDP changes a module's class and adds hooks, checkpointing and compiling put a module around it.
All of that refuses to be copied, and another process could not use it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
# What every module has; the rest is the class's own.
_COMMON = set(vars(nn.Module())) | {"_compiled_call_impl"}
_OF_SHARDING = "__composable_api_"  # how names begin that fully_shard sets


def plain_copy(block: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy on the host, in evaluation mode, whose parameters require no gradient.

    Args:
        block: Wrapped or not.
        weights: Whole parameters by name without wrappers, on the host; not copied.

    Raises:
        ValueError: If the block has something that cannot be copied.
    """
    return _copied(block, weights, "", {}).eval()


def _copied(
    module: nn.Module, weights: Mapping[str, Tensor], prefix: str, made: dict[int, nn.Parameter]
) -> nn.Module:
    module = _unwrapped(module)
    plain = _plain_class(type(module))
    new: nn.Module = object.__new__(plain)
    nn.Module.__init__(new)
    for name, value in vars(module).items():
        if name not in _COMMON and not name.startswith(_OF_SHARDING):
            vars(new)[name] = _own(value, f"{prefix}{name}", plain)
    for name, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in made:
            weight = weights[f"{prefix}{name}"]
            made[id(parameter)] = nn.Parameter(weight, requires_grad=False)
        new.register_parameter(name, None if parameter is None else made[id(parameter)])
    for name, buffer in module._buffers.items():
        new.register_buffer(name, None if buffer is None else buffer.detach().to("cpu", copy=True))
    for name, child in module._modules.items():
        new.add_module(
            name, None if child is None else _copied(child, weights, f"{prefix}{name}.", made)
        )
    return new


def _own(value: Any, name: str, owner: type) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception as error:  # whatever somebody's class raises
        raise ValueError(
            f"{owner.__name__} has {name}, a {type(value).__name__}, which cannot be copied "
            f"({error}); so no reference can be made of the block"
        ) from error


def _unwrapped(module: nn.Module) -> nn.Module:
    while len(module._modules) == 1 and (inner := next(iter(module._modules))) in _WRAPPED:
        module = module.get_submodule(inner)
    return module


def _plain_class(kind: type) -> type[nn.Module]:
    """Return the class that ``fully_shard`` was applied to, or the class itself."""
    return next(c for c in kind.__mro__ if issubclass(c, nn.Module) and not _is_sharded(c))


def _is_sharded(kind: type) -> bool:
    return issubclass(kind, FSDPModule)
