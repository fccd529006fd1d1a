"""Memory needed by a run's ranks, from its configuration alone.

Nothing is trained and nothing is allocated: parameters are counted on the meta device, activations
by :mod:`torchtitan.freezing.memory.activations`, and a rank's microbatches held at once by the
schedule's order (:mod:`timelyfreeze.whatif.rank_memory`).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torchtitan.tools.utils as titan_tools
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import TORCH_DTYPE_MAP, Optimizer
from torchtitan.models.llama3.model.args import TransformerModelArgs

from timelyfreeze.control import merge_ranks
from timelyfreeze.policies import LORA, parse_method
from timelyfreeze.runtime.linear import keep_copies
from timelyfreeze.runtime.meters import kept_vectors
from timelyfreeze.schedule import Action
from timelyfreeze.settings import HOST
from timelyfreeze.whatif.rank_memory import (
    EMBEDDING,
    HEAD,
    NORM,
    ModelBytes,
    PartBytes,
    RankMemory,
    cut_memory,
    rank_memory,
)
from torchtitan.freezing.checks import MEMORY, feature_errors
from torchtitan.freezing.memory.activations import kept_bytes, put_on_fakes
from torchtitan.freezing.values.rules import size_errors
from torchtitan.hf.decoder import Decoder, as_decoder, learns_alone
from torchtitan.hf.flavors import chosen_args
from torchtitan.hf.lean import compute_in
from torchtitan.hf.learned_loss import BLOCK_BYTES, KEPT_BYTES, learned_loss
from torchtitan.lora.adapters import add_adapters
from torchtitan.settings import (
    Freezing,
    JobConfig,
    adapters_half,
    examples_of_microbatch,
    layers_of_split,
    pipeline_order,
    stage_modules,
    weights_half,
)
from torchtitan.upstream.fixes import SGD
from torchtitan.vision.model import VisionArgs, VisionModel, image_loss
from torchtitan.vision.spec import base_spec, with_classes

# What upstream calls the ends of the model.
_PARTS = {"tok_embeddings": EMBEDDING, "norm": NORM, "output": HEAD}


def estimate_memory(job_config: JobConfig) -> list[RankMemory]:
    """Return the needs of a run's pipeline ranks, or of the single emulating device.

    Of a run that begins with adapters each rank's larger need, while these learn or behind that.
    """
    if job_config.lora.until:
        halves = adapters_half(job_config), weights_half(job_config)
        pairs = zip(*map(estimate_memory, halves), strict=True)
        return [max(pair, key=lambda memory: memory.total) for pair in pairs]
    model = model_bytes(job_config)
    n_layers = described(job_config).n_layers
    stages = stage_modules(job_config, n_layers)
    order = pipeline_order(job_config, n_layers)

    def part_of(module: str) -> str:
        return _PARTS.get(module) or model.layer_name(int(module.removeprefix("layers.")))

    def memory(actions: Sequence[Action]) -> RankMemory:
        parts = {action.stage: Counter(map(part_of, stages[action.stage])) for action in actions}
        return rank_memory(model, parts, actions, order)

    rows = (merge_ranks(order),) if job_config.emulation.enable else order.ranks
    return [memory(actions) for actions in rows]


def model_bytes(job_config: JobConfig) -> ModelBytes:
    """Return the bytes of a run's model parts; a ValueError has all reasons against."""
    if reasons := [*feature_errors(job_config, (MEMORY,)), *size_errors(job_config)]:
        raise ValueError("; ".join(reasons))
    args = described(job_config)
    mixed = TORCH_DTYPE_MAP[job_config.training.mixed_precision_param]
    how = How(
        n_rows=examples_of_microbatch(job_config),
        dtype=TORCH_DTYPE_MAP[job_config.training.dtype],
        autocast=None if mixed == torch.float32 else mixed,
        recompute=job_config.activation_checkpoint.mode == "full",
        update_copies=int(job_config.optimizer.implementation == "foreach"),
        score_bytes=score_bytes(job_config.freezing),
        optimizer_states=optimizer_states(job_config.optimizer),
    )
    if isinstance(args, VisionArgs):
        return block_bytes(args, how=how)
    prepare = None
    if job_config.freezing.method == LORA:
        lora, seed = job_config.lora, job_config.freezing.seed
        prepare = partial(add_adapters, settings=lora, seed=seed, autocast=how.autocast)
    seq_len, of_learned = job_config.training.seq_len, learns_alone(job_config, args)
    return decoder_bytes(args, how=how, seq_len=seq_len, prepare=prepare, of_learned=of_learned)


def optimizer_states(optimizer: Optimizer) -> int:
    """Return how many tensors an optimizer keeps for a weight; of SGD its momentum."""
    if optimizer.name == SGD:
        return int(optimizer.beta1 > 0)
    return 2


def score_bytes(freezing: Freezing) -> int:
    """Return a policy's bytes per weight on the device, for its scores."""
    method = parse_method(freezing.method)
    if method is None or method.policy is None or freezing.score_memory == HOST:
        return 0
    measurement = getattr(freezing, method.policy).measurement
    n_vectors = 0 if measurement is None else len(kept_vectors(measurement))
    return n_vectors * getattr(torch, freezing.score_dtype).itemsize


def described(job_config: JobConfig) -> Any:
    """Return the description of a run's model; of pictures with its classes and their size."""
    args = chosen_args(job_config, base_spec(job_config).model_args)
    if isinstance(args, VisionArgs):
        args = with_classes(args, job_config)
    args.update_from_config(job_config)
    return args


class CutMemory:
    """Predicts ranks' memory for any cut with a stage per rank."""

    def __init__(self, job_config: JobConfig, n_layers: int) -> None:
        order = pipeline_order(job_config, n_layers)
        # What a rank holds at its fullest; further arguments as ``cut_memory`` has them.
        self.of_rank = partial(cut_memory, model_bytes(job_config), order)

    def of_fullest(self, split: tuple[int, ...], n_frozen: int = 0) -> int:
        """Return the bytes of the fullest rank, for a cut given by layers of ranks."""
        return max(
            self.of_rank(rank, layers.start, layers.stop, n_frozen).total
            for rank, layers in enumerate(layers_of_split(split))
        )


class How(NamedTuple):
    """How microbatches are computed."""

    n_rows: int  # of a microbatch
    dtype: torch.dtype  # of the parameters
    autocast: torch.dtype | None = None  # what stages compute in, if not in that
    is_lean: bool = False  # whether they do so by themselves, not by autocast
    recompute: bool = False  # whether blocks keep their input alone and run again in the backward
    update_copies: int = 0  # as ``ModelBytes`` has it
    score_bytes: int = 0  # of a weight
    optimizer_states: int = 2  # as ``ModelBytes`` has it

    def casting(self) -> AbstractContextManager[Any]:
        """Return the autocast context of forwards."""
        if self.autocast is None or self.is_lean:
            return nullcontext()
        return torch.autocast("cpu", self.autocast)


def decoder_bytes(
    args: TransformerModelArgs,
    *,
    how: How,
    seq_len: int,
    prepare: Callable[[nn.Module], nn.Module] | None = None,
    of_learned: bool = False,
) -> ModelBytes:
    """Count the bytes of a prepared llama3 model's parts, and of a microbatch.

    Every token counts as learned, also ``of_learned``, where the last stage has no others.
    """
    # Other kinds of attention keep what fused attention keeps, and need masks to run.
    one = replace(as_decoder(args), n_layers=1, max_seq_len=seq_len, attn_type="sdpa")
    with torch.device("meta"), titan_tools.set_default_dtype(how.dtype):
        model: Any = Decoder(one)
        model = model if prepare is None else prepare(model)
    if how.autocast is not None:
        compute_in(model, how.autocast)  # FSDP keeps the same
        how = how._replace(is_lean=True)
    with FakeTensorMode(), titan_tools.set_default_dtype(how.dtype), keep_copies([model]):
        put_on_fakes(model)
        x = torch.empty(how.n_rows, seq_len, args.dim, dtype=how.autocast or how.dtype)
        frequencies = torch.empty(model.freqs_cis.shape, dtype=model.freqs_cis.dtype)
        labels = torch.empty(how.n_rows, seq_len, dtype=torch.int64)
        embedding = _part(model.tok_embeddings, how, 8 * x[..., 0].numel())
        head: nn.Module = nn.Sequential(model.norm, model.output)
        loss: Callable[..., Tensor] | None = partial(cross_entropy_loss, labels=labels)
        if of_learned:
            head, loss = _LearnedHead(head, args.vocab_size), None
        counted = _count(model, how, embedding, x, head, loss, frequencies, None)
    if of_learned:
        counted = _with_passing_logits(counted, how, labels.numel() * args.vocab_size)
    return replace(counted, blocks=(), outputs=())


class _LearnedHead(nn.Module):
    """The last norm, the output layer and the loss, with all tokens learned."""

    def __init__(self, head: nn.Module, vocab_size: int) -> None:
        super().__init__()
        self.head, self._vocab_size = head, vocab_size

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length = hidden.shape[:2]
        learned = torch.zeros(rows, 2, length, dtype=torch.int64)
        return learned_loss(self.head, hidden, learned, (length,) * rows, self._vocab_size)


def _with_passing_logits(counted: ModelBytes, how: How, n: int) -> ModelBytes:
    """Correct the bytes of ``n`` logits overwritten by their gradient, block by block."""
    whole = n * (how.autocast or how.dtype).itemsize
    part = 0 if whole <= KEPT_BYTES else KEPT_BYTES  # what is computed again at once
    between = whole if part and counted.head.kept_between_halves else 0
    head = replace(counted.head, kept_between_halves=between)
    return replace(counted, head=head, logits=min(BLOCK_BYTES, 4 * n) + part // 2)


class _Head(nn.Module):
    """The last norm and the output layer, from the last block's output on."""

    def __init__(self, model: VisionModel) -> None:
        super().__init__()
        self.pool = model.model_args.library.pool
        self.norm, self.output = model.norm, model.output

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output(self.norm(self.pool(hidden)))


def block_bytes(args: VisionArgs, *, how: How) -> ModelBytes:
    """Count the bytes of an image classifier's parts, and of a microbatch."""
    with torch.device("meta"), titan_tools.set_default_dtype(how.dtype):
        model = VisionModel(args)  # the library looks at values meanwhile, which fake tensors lack
    with FakeTensorMode(), titan_tools.set_default_dtype(how.dtype):
        put_on_fakes(model)
        channels = getattr(args.config(), "num_channels", 3)
        pictures = torch.empty(how.n_rows, channels, args.image_size, args.image_size)
        kept, hidden = kept_bytes(model.tok_embeddings, how.casting(), pictures)
        embedding = _part(model.tok_embeddings, how, max(kept, pictures.nbytes))
        labels = torch.empty(how.n_rows, dtype=torch.int64)
        loss = partial(image_loss, labels=labels, label_smoothing=0.0)
        return _count(model, how, embedding, hidden, _Head(model), loss)


def _count(
    model: Any,
    how: How,
    embedding: PartBytes,
    hidden: Tensor,
    head: nn.Module,
    loss: Callable[[Tensor], Tensor] | None,
    *shared: Any,
) -> ModelBytes:
    """Count a model's parts; blocks get the embedding's output, and inputs shared by batches."""
    blocks, outputs, recomputed = [], [hidden.nbytes], 0
    for block in model.layers.values():
        enters = torch.empty_like(hidden, requires_grad=True)
        between = _output_bytes(block)
        kept, hidden = kept_bytes(block, how.casting(), enters, *shared)
        if how.recompute:
            recomputed, kept = max(recomputed, kept), enters.nbytes
        blocks.append(_part(block, how, kept, sum(between.values())))
        outputs.append(hidden.nbytes)
    enters, between = torch.empty_like(hidden, requires_grad=True), _output_bytes(head)
    kept, logits = kept_bytes(head, how.casting(), enters, loss=loss)
    return ModelBytes(
        embedding=embedding,
        layer=blocks[0],
        norm=_part(model.norm, how),
        head=_part(model.output, how, kept, sum(between.values())),
        message=outputs[0],
        logits=4 * logits.numel(),
        recomputed=recomputed,
        update_copies=how.update_copies,
        optimizer_states=how.optimizer_states,
        blocks=tuple(blocks),
        outputs=tuple(outputs),
    )


# Whose weights autocast casts; an embedding is looked up as it is, and norms stay in float32.
_CAST = (nn.Linear, nn.Conv2d)


def _output_bytes(module: nn.Module) -> dict[nn.Module, int]:
    """Return a holder of the output bytes of learning layers of ``_CAST`` in a forward."""
    found: dict[nn.Module, int] = {}

    def note(child: nn.Module, _: object, output: Tensor) -> None:
        found[child] = output.nbytes

    for child in module.modules():
        if isinstance(child, _CAST) and child.weight.requires_grad:
            child.register_forward_hook(note)
    return found


def _part(module: nn.Module, how: How, kept: int = 0, kept_between_halves: int = 0) -> PartBytes:
    every = [*module.parameters()]
    trained = [p.nbytes for p in every if p.requires_grad]
    cast = [p for m in module.modules() if isinstance(m, _CAST) for p in m.parameters()]
    return PartBytes(
        weights=sum(p.nbytes for p in every),
        casts=sum(
            p.numel() * how.autocast.itemsize for p in cast if how.autocast not in (None, p.dtype)
        ),
        kept=kept,
        kept_between_halves=kept_between_halves,
        largest_weight=max(trained, default=0),
        trained=None if len(trained) == len(every) else sum(trained),
        scores=how.score_bytes * sum(p.numel() for p in every),
    )
