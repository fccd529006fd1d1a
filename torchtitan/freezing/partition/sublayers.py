"""Blocks cut between attention and MLP, the units of PipeTransformer's Algorithm 1.

A half keeps the block's class, its number and the names of its tensors. What lies on another stage
adds nothing to the residual, so no family needs a forward of its own.
"""

import copy
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.distributed import ParallelDims

from torchtitan.settings import ATTENTION, MLP, JobConfig, cuts_blocks

# Children of a block, by ``model.name``; its attention returns weights beside its output in the
# library alone.
_CHILDREN = {
    "llama3": {ATTENTION: ("attention_norm", "attention"), MLP: ("ffn_norm", "feed_forward")},
    "vit": {ATTENTION: ("layernorm_before", "attention"), MLP: ("layernorm_after", "mlp")},
}
_IN_PAIRS = {("vit", "attention")}


def sublayer_sizes(kind: str, block: nn.Module) -> tuple[int, int]:
    """Return the numbers of parameters of a block's attention and of its MLP, norms included."""
    attention, mlp = (
        sum(p.numel() for name in names for p in block.get_submodule(name).parameters())
        for names in _CHILDREN[kind].values()
    )
    return attention, mlp


class _Elsewhere(nn.Module):
    """In place of a child that lies on another stage: a residual of 0."""

    def __init__(self, *, in_pair: bool) -> None:
        super().__init__()
        self._in_pair = in_pair

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        nothing = hidden.new_zeros(())
        return (nothing, None) if self._in_pair else nothing

    def init_weights(self, *args: Any) -> None:
        """Draw nothing."""

    reset_parameters = init_weights


def _half(kind: str, block: nn.Module, sublayer: str) -> nn.Module:
    half = copy.deepcopy(block)
    for other, names in _CHILDREN[kind].items():
        for name in names if other != sublayer else ():
            setattr(half, name, _Elsewhere(in_pair=(kind, name) in _IN_PAIRS))
    return half


def build_with_sublayers(
    build: Callable[..., Any],
    model: Any,
    parallel_dims: ParallelDims,
    config: JobConfig,
    device: torch.device,
    model_args: Any,
    parallelize: Callable[..., nn.Module],
    *others: Any,
) -> Any:
    """Build the stages of upstream's ``pipelining_fn``, ``build``, also of blocks that are cut.

    It gets the halves as layers of their own, and they their block's number before anything is
    known by its name.
    """
    if not cuts_blocks(config):
        return build(model, parallel_dims, config, device, model_args, parallelize, *others)
    layers = {}
    for name in chain(*(config.parallelism.module_fqns_per_model_part or ())):
        kind, _, key = name.partition(".")
        if kind == "layers":
            number, _, sublayer = key.partition("/")
            block = model.layers[number]
            layers[key] = _half(config.model.name, block, sublayer) if sublayer else block
    model.layers = nn.ModuleDict(layers)

    def parallelized(part: Any, *args: Any) -> nn.Module:
        blocks = {key.partition("/")[0]: block for key, block in part.layers.items()}
        part.layers = nn.ModuleDict(blocks)
        return parallelize(part, *args)

    return build(model, parallel_dims, config, device, model_args, parallelized, *others)
