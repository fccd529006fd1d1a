"""Captures inputs and outputs of neighbouring blocks of a stage, once."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from timelyfreeze.policies import ModelLayout
from timelyfreeze.policies.plasticity import spread_evenly
from timelyfreeze.runtime.linear import StageLinear
from timelyfreeze.runtime.reference.model import CapturedBatch, first_tensor
from timelyfreeze.runtime.shards import copied, copy_to_host
from timelyfreeze.runtime.stage import FreezingStage
from timelyfreeze.settings import key

_PLAIN = (bool, int, float, str, type(None))


@dataclass(eq=False)
class Capture:
    """Hooks on blocks copying their first microbatch to the host.

    Copies from a GPU are begun and not waited for. At most ``max_tokens`` of an output [B, T, d]
    are kept; for 0, and for outputs of another form, such as [B, C, H, W], whole examples.
    ``n_tokens`` returns, when the batch runs, the number of tokens before the padding by example of
    the first microbatch; None if unknown.
    """

    stage: FreezingStage
    blocks: Sequence[nn.Module]
    step: int
    first: int
    max_tokens: int
    n_tokens: Callable[[], Sequence[int] | None] = lambda: None
    batch: CapturedBatch | None = None

    def __post_init__(self) -> None:
        """Put the hooks on."""
        self._inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._hooks = [
            self.blocks[0].register_forward_pre_hook(self._enter, with_kwargs=True),
            self.blocks[-1].register_forward_hook(self._leave),
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.stage.forwarding != 0 or self.batch is not None:
            return
        if not args or not isinstance(args[0], Tensor) or args[0].dim() < 2:
            raise ValueError(
                f"{type(block).__name__} is called without a hidden state as its first argument, "
                "so its output cannot be compared with a copy's; use another method than egeria"
            )
        self._inputs = (
            tuple(_to_host(value, block) for value in args),
            {name: _to_host(value, block) for name, value in kwargs.items()},
        )

    def _leave(self, block: nn.Module, args: Any, output: Any) -> None:
        if self._inputs is None or self.batch is not None:
            return
        hidden = first_tensor(output).detach()
        rows = None
        if self.max_tokens and hidden.dim() == 3:
            rows = torch.from_numpy(self._rows(hidden.shape))
            hidden = hidden.flatten(0, -2).index_select(0, rows.to(hidden.device))
        elif len(hidden) < 2:
            raise ValueError(
                "a microbatch has one example, which is like no other; egeria compares how alike "
                "examples are, so give it two or more"
            )
        output, (args, kwargs) = _to_host(hidden, block), self._inputs
        self.batch = CapturedBatch(
            self.step, self.first, args, kwargs, rows, output, copied(hidden)
        )

    def _rows(self, shape: torch.Size) -> NDArray[np.int64]:
        """Return the rows of an output, as [-1, d], to keep: no padding, evenly spread."""
        length, n_rows = shape[-2], shape[:-1].numel()
        n_tokens = self.n_tokens()
        known = np.arange(n_rows)
        if n_tokens is not None and len(n_tokens) * length >= n_rows:
            limits = np.array(n_tokens[: n_rows // length])
            known = known[known % length < limits[known // length]]
        if len(known) == 0:  # an example of padding alone
            known = np.arange(n_rows)
        kept: NDArray[np.int64] = known[spread_evenly(len(known), self.max_tokens)]
        return kept


def _to_host(value: Any, block: nn.Module) -> Any:
    """Return a copy on the host, possibly still on its way from a GPU."""
    if type(value) is tuple:  # as rotations are handed over: cosines and sines
        return tuple(_to_host(part, block) for part in value)
    if isinstance(value, DTensor) or not isinstance(value, (Tensor, *_PLAIN)):
        raise ValueError(
            f"{type(block).__name__} is called with a {type(value).__name__}, which cannot be "
            "handed to a copy of it on the host; use another method than egeria, or for a mask of "
            "flex attention a model with 'sdpa'"
        )
    return copy_to_host(value) if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class StageBlock:
    """A transformer block of this rank."""

    stage: FreezingStage  # its stage
    module: nn.Module  # wrapped or not
    parameters: dict[str, Tensor]  # by name in the model, as the optimizer has them
    prefix: str  # what those names begin with


def stage_blocks(layout: ModelLayout, stages: Sequence[FreezingStage]) -> dict[int, StageBlock]:
    """Return the blocks of a rank by layer: the modules whose name ends in the layer's number."""
    layer_of = dict(zip(layout.names, layout.layers.tolist(), strict=True))
    blocks: dict[int, StageBlock] = {}
    for stage in stages:
        paths = [path for path, _ in stage.submod.named_parameters()]
        named = stage.named_stage_parameters()
        for path, (name, parameter) in zip(paths, named, strict=True):
            layer = layer_of[name]
            if not 0 <= layer < layout.n_layers:
                continue
            if layer not in blocks:
                module = stage.submod.get_submodule(_to_number(path))
                blocks[layer] = StageBlock(stage, module, {}, f"{_to_number(name)}.")
            blocks[layer].parameters[name] = parameter
    return blocks


def check_importable(blocks: Mapping[int, StageBlock]) -> None:
    """Refuse classes of the started script, not importable by other processes."""
    for layer, block in blocks.items():
        for module in block.module.modules():
            if type(module).__module__ == "__main__":
                raise ValueError(
                    f"block {layer} has a {type(module).__name__}, whose class stands in the "
                    "script that was started; a process of its own could not import it, so put it "
                    f'into a module, or set {key("egeria.reference")} to "inline"'
                )


def _to_number(name: str) -> str:
    """Return a name up to its first number."""
    parts = name.split(".")
    return ".".join(parts[: 1 + next(i for i, part in enumerate(parts) if part.isdigit())])


_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
# What every module has; the rest is the class's own.
_COMMON = set(vars(nn.Module())) | {"_compiled_call_impl"}
_OF_SHARDING = "__composable_api_"  # how names begin that fully_shard sets


def plain_copy(
    block: nn.Module,
    weights: Mapping[str, Tensor],
    prefix: str = "",
    made: dict[int, nn.Parameter] | None = None,
) -> nn.Module:
    """Return a copy on the host, in evaluation mode, without gradients.

    Weights are whole, by name without wrappers, on the host; they are not copied. ``prefix`` begins
    the names of a part, ``made`` are parameters shared with other parts.
    """
    made = {} if made is None else made
    while len(block._modules) == 1 and (inner := next(iter(block._modules))) in _WRAPPED:
        block = block.get_submodule(inner)
    # The class that ``fully_shard`` was applied to or a stage has adopted, or the block's own.
    kinds = (k for k in type(block).__mro__ if not issubclass(k, (FSDPModule, StageLinear)))
    plain = next(kind for kind in kinds if issubclass(kind, nn.Module))
    new: nn.Module = object.__new__(plain)
    nn.Module.__init__(new)
    for name, value in vars(block).items():
        is_of_stage = isinstance(block, StageLinear) and name in StageLinear.__annotations__
        if name not in _COMMON and not is_of_stage and not name.startswith(_OF_SHARDING):
            vars(new)[name] = _own(value, f"{prefix}{name}", plain)
    for name, parameter in block._parameters.items():
        if parameter is not None and id(parameter) not in made:
            weight = weights[f"{prefix}{name}"]
            made[id(parameter)] = nn.Parameter(weight, requires_grad=False)
        new.register_parameter(name, None if parameter is None else made[id(parameter)])
    for name, buffer in block._buffers.items():
        new.register_buffer(name, None if buffer is None else buffer.detach().to("cpu", copy=True))
    for name, child in block._modules.items():
        part = None if child is None else plain_copy(child, weights, f"{prefix}{name}.", made)
        new.add_module(name, part)
    return new.eval()


def _own(value: Any, name: str, owner: type) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception as error:  # whatever somebody's class raises
        raise ValueError(
            f"{owner.__name__} has {name}, a {type(value).__name__}, which cannot be copied "
            f"({error}); so no reference can be made of the block"
        ) from error
