"""What a run needs of each rank's memory, told from its configuration alone.

Nothing is trained and nothing is allocated: parameters are counted on the meta device, activations
by :mod:`torchtitan.freezing.memory.activations`, and how many microbatches a rank holds at once by
going through the schedule's order (:mod:`timelyfreeze.whatif.rank_memory`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torchtitan.tools.utils as titan_tools
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.llama3 import llama3_args
from torchtitan.models.llama3.model.args import TransformerModelArgs

from timelyfreeze.emulation import merge_ranks
from timelyfreeze.policies import LORA
from timelyfreeze.schedule import Action
from timelyfreeze.whatif.rank_memory import (
    EMBEDDING,
    HEAD,
    LAYER,
    NORM,
    BlockBytes,
    ModelBytes,
    PartBytes,
    PartlyTrained,
    RankMemory,
    frozen_parts,
    parts_of,
    rank_memory,
)
from torchtitan.freezing.checks import MEMORY, feature_errors, size_errors
from torchtitan.freezing.config import (
    IMAGE_MODELS,
    JobConfig,
    examples_of_microbatch,
    pipeline_order,
    stage_modules,
)
from torchtitan.freezing.emulation.pipeline import emulated_order
from torchtitan.freezing.memory.activations import kept_bytes, module_bytes, put_on_fakes
from torchtitan.hf.adapter import Decoder, as_decoder
from torchtitan.hf.flavors import chosen_args
from torchtitan.lora.adapters import add_adapters
from torchtitan.vision.library import VisionArgs
from torchtitan.vision.model import VisionModel
from torchtitan.vision.spec import base_spec, with_classes

# What upstream calls the ends of the model.
_INPUT = "tok_embeddings"
_PARTS = {_INPUT: EMBEDDING, "norm": NORM, "output": HEAD}


def estimate_memory(job_config: JobConfig) -> list[RankMemory]:
    """Return what each pipeline rank of a run needs, or the one device that emulates them all.

    Raises:
        ValueError: As ``model_bytes``.
    """
    model = model_bytes(job_config)
    n_layers = _args(job_config).n_layers
    stages = stage_modules(job_config, n_layers)
    order = emulated_order(job_config, n_layers)

    def part_of(module: str) -> str:
        return _PARTS.get(module) or model.layer_name(int(module.removeprefix("layers.")))

    def memory(actions: Sequence[Action]) -> RankMemory:
        parts = {action.stage: Counter(map(part_of, stages[action.stage])) for action in actions}
        return rank_memory(
            model, parts, actions, n_stages=order.n_stages, n_microbatches=order.n_microbatches
        )

    rows = (merge_ranks(order),) if job_config.emulation.enable else order.ranks
    return [memory(actions) for actions in rows]


def model_bytes(job_config: JobConfig) -> ModelBytes:
    """Return what the parts of the model of a run take.

    Raises:
        ValueError: If the run is of a kind that is not covered, or its keys contradict each other;
            all reasons are named.
    """
    if reasons := [*feature_errors(job_config, (MEMORY,)), *size_errors(job_config)]:
        raise ValueError("; ".join(reasons))
    args = _args(job_config)
    dtype = TORCH_DTYPE_MAP[job_config.training.dtype]
    mixed = TORCH_DTYPE_MAP[job_config.training.mixed_precision_param]
    n_rows, autocast = examples_of_microbatch(job_config), None if mixed == torch.float32 else mixed
    recompute = job_config.activation_checkpoint.mode == "full"
    update_copies = int(job_config.optimizer.implementation == "foreach")
    if isinstance(args, VisionArgs):
        return block_bytes(
            args,
            n_pictures=n_rows,
            dtype=dtype,
            autocast=autocast,
            recompute=recompute,
            update_copies=update_copies,
        )
    prepare = partial(_prepared, job_config, autocast)
    kept = module_bytes(
        args,
        n_rows=n_rows,
        seq_len=job_config.training.seq_len,
        dtype=dtype,
        autocast=autocast,
        recompute=recompute,
        prepare=prepare,
    )
    with titan_tools.set_default_dtype(dtype):
        modules = model_modules(args, prepare)

    def part(module: str, kept: int = 0, kept_between_halves: int = 0) -> PartBytes:
        parameters = dict(modules[module].named_parameters())
        trained = [p.nbytes for p in parameters.values() if p.requires_grad]
        # An embedding is looked up as it is, and norms stay in float32.
        cast = [
            p.numel() * autocast.itemsize
            for name, p in parameters.items()
            if module != _INPUT and (p.dim() == 2 or name.endswith("bias"))
            if autocast not in (None, p.dtype)
        ]
        whole = PartBytes(
            weights=sum(p.nbytes for p in parameters.values()),
            casts=sum(cast),
            kept=kept,
            kept_between_halves=kept_between_halves,
            largest_weight=max(trained, default=0),
        )
        if len(trained) == len(parameters):
            return whole
        return PartlyTrained(**vars(whole), trained=sum(trained))

    return ModelBytes(
        embedding=part(_INPUT, kept.tokens),
        layer=part("layers.0", kept.block, kept.block_linear_outputs),
        norm=part("norm"),
        head=part("output", kept.head, kept.head_linear_outputs),
        message=kept.hidden,
        logits=kept.logits,
        recomputed=kept.recomputed,
        update_copies=update_copies,
    )


def _args(job_config: JobConfig) -> Any:
    """Return the description of a run's model; of pictures with its classes and their size."""
    if job_config.model.name not in IMAGE_MODELS:
        return chosen_args(job_config, llama3_args)
    args = chosen_args(job_config, base_spec(job_config).model_args)
    args = with_classes(args, job_config)
    args.update_from_config(job_config)
    return args


def _prepared(config: JobConfig, autocast: torch.dtype | None, model: nn.Module) -> nn.Module:
    """Freeze and add what a run freezes for good and adds."""
    if config.freezing.method != LORA:
        return model
    return add_adapters(model, config.lora, config.freezing.seed, autocast)


def parameter_shapes(args: TransformerModelArgs) -> dict[str, dict[str, torch.Size]]:
    """Return the shape of each parameter, by module ("layers.3", "output", ...) and name in it."""
    modules = model_modules(args)
    return {name: {n: p.shape for n, p in m.named_parameters()} for name, m in modules.items()}


def model_modules(
    args: TransformerModelArgs, prepare: Callable[[nn.Module], nn.Module] = lambda model: model
) -> dict[str, nn.Module]:
    """Return the parts of a model without memory, after ``prepare``, as ``module_bytes`` has it."""
    with torch.device("meta"):
        model: Any = prepare(Decoder(as_decoder(args)))
    return {
        **{name: getattr(model, name) for name in _PARTS},
        **{f"layers.{name}": layer for name, layer in model.layers.items()},
    }


class CutMemory:
    """Tells what ranks need, wherever the model is cut.

    Args:
        job_config: A run with one stage on each rank.
        n_layers: Layers of its model.

    Raises:
        ValueError: As ``model_bytes``.
    """

    def __init__(self, job_config: JobConfig, n_layers: int) -> None:
        self._model = model_bytes(job_config)
        self._order = pipeline_order(job_config, n_layers)

    def of_rank(self, rank: int, start: int, stop: int, n_frozen: int = 0) -> RankMemory:
        """Return what a rank holds at its fullest.

        Args:
            rank: Which one.
            start: Its first layer.
            stop: The layer behind its last.
            n_frozen: Layers in front of the model that are frozen, the embedding with them.
        """
        order = self._order
        parts = parts_of(rank, order.n_stages, stop - start)
        live, frozen = frozen_parts(parts, min(max(n_frozen - start, 0), parts[LAYER]))
        return rank_memory(
            self._model,
            {rank: live},
            order.ranks[rank],
            n_stages=order.n_stages,
            n_microbatches=order.n_microbatches,
            frozen=frozen,
        )

    def of_fullest(self, split: tuple[int, ...], n_frozen: int = 0) -> int:
        """Return the bytes of the rank that holds most, of a cut given by layers of each rank."""
        ends = [sum(split[: rank + 1]) for rank in range(len(split))]
        return max(
            self.of_rank(rank, end - n, end, n_frozen).total
            for rank, (n, end) in enumerate(zip(split, ends, strict=True))
        )


_CAST = (nn.Linear, nn.Conv2d)


class _Head(nn.Module):
    """The last norm and the output layer, from the last block's output on."""

    def __init__(self, model: VisionModel) -> None:
        super().__init__()
        self.pool = model.model_args.library.pool
        self.norm, self.output = model.norm, model.output

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output(self.norm(self.pool(hidden)))


def block_bytes(
    args: VisionArgs,
    *,
    n_pictures: int,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
    recompute: bool,
    update_copies: int,
) -> BlockBytes:
    """Count what the parts of an image classifier keep in one microbatch.

    Args:
        args: The model, with the classes and the size of pictures of the run.
        n_pictures: Pictures of a microbatch.
        dtype: Type of the parameters.
        autocast: Type that stages compute in under autocast; None without autocast.
        recompute: Whether blocks keep their input alone and run again in the backward.
        update_copies: As ``ModelBytes`` has it.
    """
    casting = nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast)
    cast_bytes = 0 if autocast in (None, dtype) else (autocast or dtype).itemsize
    part = partial(_part, itemsize=dtype.itemsize, cast_bytes=cast_bytes)
    with torch.device("meta"), titan_tools.set_default_dtype(dtype):
        model = VisionModel(args)  # the library looks at values meanwhile, which fake tensors lack
    with FakeTensorMode(), titan_tools.set_default_dtype(dtype):
        put_on_fakes(model)
        channels = getattr(args.config(), "num_channels", 3)
        pictures = torch.empty(n_pictures, channels, args.image_size, args.image_size)
        kept, hidden = kept_bytes(model.tok_embeddings, casting, pictures)
        embedding = part(model.tok_embeddings, max(kept, pictures.nbytes), 0)
        blocks, outputs, recomputed = [], [hidden.nbytes], 0
        for block in model.layers.values():
            enters = torch.empty_like(hidden, requires_grad=True)
            between = _OutputBytes(block)
            kept, hidden = kept_bytes(block, casting, enters)
            if recompute:
                recomputed, kept = max(recomputed, kept), enters.nbytes
            blocks.append(part(block, kept, between.total))
            outputs.append(hidden.nbytes)
        labels = torch.empty(n_pictures, dtype=torch.int64)
        head, enters = _Head(model), torch.empty_like(hidden, requires_grad=True)
        between = _OutputBytes(head)
        kept, logits = kept_bytes(
            head, casting, enters, loss=lambda out: F.cross_entropy(out.float(), labels)
        )
        return BlockBytes(
            embedding=embedding,
            layer=blocks[0],
            norm=part(model.norm, 0, 0),
            head=part(model.output, kept, between.total),
            message=outputs[0],
            logits=4 * logits.numel(),
            recomputed=recomputed,
            update_copies=update_copies,
            blocks=tuple(blocks),
            outputs=tuple(outputs),
        )


class _OutputBytes:
    """Bytes that linear layers and convolutions put out in a module's first forward."""

    def __init__(self, module: nn.Module) -> None:
        self._of: dict[nn.Module, int] = {}
        for child in module.modules():
            if isinstance(child, _CAST):
                child.register_forward_hook(self._note)

    def _note(self, child: nn.Module, _: object, output: Tensor) -> None:
        self._of[child] = output.nbytes

    @property
    def total(self) -> int:
        return sum(self._of.values())


def _part(
    module: nn.Module, kept: int, between_halves: int, *, itemsize: int, cast_bytes: int
) -> PartBytes:
    sizes = [p.numel() for p in module.parameters()]
    cast = [p.numel() for m in module.modules() if isinstance(m, _CAST) for p in m.parameters()]
    return PartBytes(
        weights=sum(sizes) * itemsize,
        casts=sum(cast) * cast_bytes,
        kept=kept,
        kept_between_halves=between_halves,
        largest_weight=max(sizes) * itemsize,
    )
