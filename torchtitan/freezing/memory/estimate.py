"""What a run needs of each rank's memory, told from its configuration alone.

Nothing is trained and nothing is allocated: parameters are counted on the meta device, activations
by :mod:`torchtitan.freezing.memory.activations`, and how many microbatches a rank holds at once by
going through the schedule's order. Nothing is taken to be frozen: that is the most a run needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.llama3 import Transformer, llama3_args
from torchtitan.models.llama3.model.args import TransformerModelArgs

from timelyfreeze.emulation import merge_ranks
from timelyfreeze.schedule import Action, ActionKind, ScheduleOrder
from torchtitan.freezing.checks import peer_errors, size_errors
from torchtitan.freezing.config import (
    JobConfig,
    examples_of_microbatch,
    stage_modules,
)
from torchtitan.freezing.emulation.pipeline import emulated_order
from torchtitan.freezing.memory.activations import ModuleBytes, module_bytes
from torchtitan.hf.flavors import LLAMA, chosen_args

# Adam and AdamW, the optimizers that upstream has, keep two running means.
_N_OPTIMIZER_STATES = 2
# The context of the device, communication buffers, and what the allocator cannot use.
RESERVE_BYTES = 2 * 1024**3

_INPUT, _NORM, _OUTPUT = "tok_embeddings", "norm", "output"


@dataclass(frozen=True)
class RankMemory:
    """Bytes that a rank holds at the fullest moment of a training step.

    Attributes:
        parameters: The weights.
        gradients: One for each weight.
        optimizer: The optimizer's state: two tensors for each weight with Adam and AdamW.
        casts: Weights of linear layers in the type that autocast computes in; made once for all
            microbatches of a batch.
        activations: What forwards have left for backwards that are still to come.
        messages: Receive buffers, one for each microbatch and neighbour.
        scratch: The largest passing tensors: a weight gradient before it is added, and the logits'
            gradient.
    """

    parameters: int
    gradients: int
    optimizer: int
    casts: int
    activations: int
    messages: int
    scratch: int

    @property
    def total(self) -> int:
        """Everything together."""
        return sum(getattr(self, field.name) for field in fields(self))

    def fits(self, device_bytes: float) -> bool:
        """Return whether a device of that size has room for it beside the reserve."""
        return self.total + RESERVE_BYTES <= device_bytes


def estimate_memory(job_config: JobConfig) -> list[RankMemory]:
    """Return what each pipeline rank of a run needs, or the one device that emulates them all.

    Raises:
        ValueError: If the run is of a kind that is not covered, or its keys contradict each other;
            all reasons are named.
    """
    if reasons := list(_not_covered(job_config)):
        raise ValueError("; ".join(reasons))
    args = chosen_args(job_config, llama3_args)
    stages = stage_modules(job_config, args.n_layers)
    order = emulated_order(job_config, args.n_layers)
    dtype = TORCH_DTYPE_MAP[job_config.training.dtype]
    mixed = TORCH_DTYPE_MAP[job_config.training.mixed_precision_param]
    kept = module_bytes(
        args,
        n_rows=examples_of_microbatch(job_config),
        seq_len=job_config.training.seq_len,
        dtype=dtype,
        autocast=None if mixed == torch.float32 else mixed,
        recompute=job_config.activation_checkpoint.mode == "full",
    )
    shapes = parameter_shapes(args)
    cast_bytes = 0 if mixed in (torch.float32, dtype) else mixed.itemsize
    rows = (merge_ranks(order),) if job_config.emulation.enable else order.ranks
    return [
        _rank_memory(job_config, order, actions, stages, shapes, kept, dtype, cast_bytes)
        for actions in rows
    ]


def _not_covered(config: JobConfig) -> Iterator[str]:
    if config.model.name != LLAMA:
        yield f"model.name is {config.model.name!r}; memory is estimated for {LLAMA!r}"
    yield from peer_errors(config, "memory is estimated for pipeline parallelism alone")
    if config.activation_checkpoint.mode not in ("none", "full"):
        yield (
            f"activation_checkpoint.mode is {config.activation_checkpoint.mode!r}; memory is "
            'estimated for "none" and "full"'
        )
    yield from size_errors(config)


def peak_bytes(
    actions: Sequence[Action],
    kept: Callable[[int], int],
    kept_between_halves: Callable[[int], int],
) -> int:
    """Return the most that ``actions``, run one after the other, hold at once.

    Args:
        actions: What one rank runs.
        kept: Bytes that a forward of a stage leaves until its backward or weight backward is done.
        kept_between_halves: Bytes that an input backward adds until then.
    """
    held = peak = 0
    for action in actions:
        if action.kind is ActionKind.FORWARD:
            held += kept(action.stage)
        elif action.kind is ActionKind.INPUT_BACKWARD:
            held += kept_between_halves(action.stage)
        peak = max(peak, held)
        if action.kind in (ActionKind.FULL_BACKWARD, ActionKind.WEIGHT_BACKWARD):
            held -= kept(action.stage)
        if action.kind is ActionKind.WEIGHT_BACKWARD:  # the second half of a split backward
            held -= kept_between_halves(action.stage)
    return peak


def parameter_shapes(args: TransformerModelArgs) -> dict[str, list[torch.Size]]:
    """Return the shape of each parameter, by module: "layers.3", "output", ..."""
    with torch.device("meta"):
        model = Transformer(args)
    modules: dict[str, nn.Module] = {
        **{name: getattr(model, name) for name in (_INPUT, _NORM, _OUTPUT)},
        **{f"layers.{name}": layer for name, layer in model.layers.items()},
    }
    return {name: [p.shape for p in m.parameters()] for name, m in modules.items()}


def _rank_memory(
    config: JobConfig,
    order: ScheduleOrder,
    actions: Sequence[Action],
    stages: list[list[str]],
    shapes: dict[str, list[torch.Size]],
    kept: ModuleBytes,
    dtype: torch.dtype,
    cast_bytes: int,
) -> RankMemory:
    """Return what a device holds that runs ``actions`` of the order, one after the other."""
    held = sorted({action.stage for action in actions})
    modules = [module for stage in held for module in stages[stage]]
    tensors = [(module, shape) for module in modules for shape in shapes[module]]
    sizes = [shape.numel() for _, shape in tensors]
    # An embedding is looked up as it is, and norms stay in float32.
    linear = [s.numel() for module, s in tensors if len(s) == 2 and module != _INPUT]
    last = order.n_stages - 1

    def forward_bytes(stage: int) -> int:
        return _stage_bytes(stages[stage], kept.block, kept.head, kept.tokens) + (
            kept.hidden if stage < last else 0
        )

    def between_halves(stage: int) -> int:
        return _stage_bytes(stages[stage], kept.block_linear_outputs, kept.head_linear_outputs, 0)

    # Each stage has an optimizer of its own.
    largest = dtype.itemsize * max(
        sum(shape.numel() for module in stages[stage] for shape in shapes[module]) for stage in held
    )
    n_neighbours = sum((stage > 0) + (stage < last) for stage in held)
    parameters = sum(sizes) * dtype.itemsize
    return RankMemory(
        parameters=parameters,
        gradients=parameters,
        optimizer=_N_OPTIMIZER_STATES * parameters,
        casts=sum(linear) * cast_bytes,
        activations=peak_bytes(actions, forward_bytes, between_halves),
        messages=n_neighbours * order.n_microbatches * kept.hidden if last else 0,
        scratch=max(sizes) * dtype.itemsize
        + (2 * kept.logits if last in held else 0)
        + kept.recomputed
        + (largest if config.optimizer.implementation == "foreach" else 0),
    )


def _stage_bytes(modules: Sequence[str], block: int, head: int, tokens: int) -> int:
    n_blocks = sum(name.startswith("layers.") for name in modules)
    return n_blocks * block + (_OUTPUT in modules) * head + (_INPUT in modules) * tokens
