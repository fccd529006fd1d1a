"""Peak memory of a rank, from the bytes of the parts of a model.

A part is the embedding, a layer, the last norm or the head. Nothing counts as frozen unless given,
for the largest need of a run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

from timelyfreeze.files import Count
from timelyfreeze.schedule import Action, ActionKind, ScheduleOrder

# The context of the device, communication buffers, and what the allocator cannot use.
RESERVE_BYTES = 2 * 1024**3

EMBEDDING, LAYER, NORM, HEAD = "embedding", "layer", "norm", "head"
# How many of each part a stage has.
Parts = Mapping[str, int]
_NO_PARTS: Parts = {}


@dataclass(frozen=True)
class PartBytes:
    """Bytes of a part of a model, on any rank."""

    weights: Count
    # Weights in the type that autocast computes in; made once for all microbatches of a batch.
    casts: Count
    kept: Count  # what a forward leaves until its backward or weight backward is done
    kept_between_halves: Count  # what an input backward adds until then
    largest_weight: Count  # the largest weight that is trained
    trained: Count | None = None  # weights that are not frozen for good; None: all of them
    scores: Count = 0  # vectors that a policy keeps on the device for its scores

    @property
    def gradients(self) -> int:
        """Bytes of gradients; every state of the optimizer takes as much."""
        return self.weights if self.trained is None else self.trained


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of a model in training, in microbatches of the same size."""

    embedding: PartBytes
    layer: PartBytes
    norm: PartBytes  # the last norm; what it keeps counts with the head
    head: PartBytes  # the output layer and the loss
    message: Count  # what a stage sends to the next for each microbatch
    logits: Count  # half of what the loss takes in passing: all logits in float32, or a block
    recomputed: Count  # what a layer keeps that runs again in the backward; 0 if none does
    # Copies of a stage's weights that its optimizer's update takes: 1 if it updates all of them at
    # once, 0 if one after the other.
    update_copies: Count
    # Where layers differ, each is a part of its own, called by its number; ``layer`` is the first.
    blocks: tuple[PartBytes, ...] = ()
    # What the embedding then puts out, and each layer; ``message`` is the first.
    outputs: tuple[Count, ...] = ()
    optimizer_states: int = 2  # tensors for a weight; Adam and AdamW have two running means

    @property
    def are_alike(self) -> bool:
        """Whether all layers take as much, and send on as much as they get."""
        return len(set(self.blocks)) <= 1 and len(set(self.outputs)) <= 1

    def total(self, parts: Parts, name: str) -> int:
        """Return the sum of a field of ``PartBytes`` over parts."""
        return sum(n * int(getattr(self.part(part), name)) for part, n in parts.items())

    def part(self, name: str) -> PartBytes:
        """Return the bytes of ``EMBEDDING``, ``LAYER``, ``NORM``, ``HEAD`` or a layer's number."""
        part: PartBytes = self.blocks[int(name)] if name.isdigit() else getattr(self, name)
        return part

    def layer_name(self, index: int) -> str:
        """Return the part of a layer, by its number."""
        return str(index) if self.blocks else LAYER

    def received(self, parts: Parts) -> int:
        """Return the bytes of a message received by a stage with these parts."""
        return self._output(min(_numbers(parts), default=len(self.blocks)))

    def sent(self, parts: Parts) -> int:
        """Return the bytes of a message sent; a first stage may have no layers."""
        return self._output(max(_numbers(parts), default=-1) + 1)

    def _output(self, layer: int) -> int:
        """Return a layer's input."""
        return self.outputs[layer] if self.outputs else self.message


def _numbers(parts: Parts) -> list[int]:
    return [int(name) for name in parts if name.isdigit()]


@dataclass(frozen=True)
class RankMemory:
    """Peak bytes of a rank in a training step."""

    parameters: int  # the weights
    gradients: int  # one for each weight that is trained
    optimizer: int  # the optimizer's state, for each of them
    # Weights of linear layers in the type that autocast computes in; made once for all microbatches
    # of a batch.
    casts: Count
    activations: int  # what forwards have left for backwards that are still to come
    messages: int  # receive buffers, one for each microbatch and neighbour
    # The largest passing tensors: a weight gradient before it is added, and the logits' gradient.
    scratch: int
    scores: int = 0  # vectors that a policy keeps for its scores

    @property
    def total(self) -> int:
        """Everything together."""
        return sum(getattr(self, field.name) for field in fields(self))

    def fits(self, device_bytes: float) -> bool:
        """Return whether a device of this size has room beside the reserve."""
        return self.total + RESERVE_BYTES <= device_bytes


def parts_of(stage: int, n_stages: int, n_layers: int) -> dict[str, int]:
    """Return the parts of a stage with ``n_layers``; the ends of the model are with its ends."""
    first = {EMBEDDING: 1} if stage == 0 else {}
    last = {NORM: 1, HEAD: 1} if stage == n_stages - 1 else {}
    return {**first, LAYER: n_layers, **last}


def rank_memory(
    model: ModelBytes,
    stages: Mapping[int, Parts],
    actions: Sequence[Action],
    order: ScheduleOrder,
    frozen: Parts = _NO_PARTS,
) -> RankMemory:
    """Return the memory of a device running ``actions`` of an order one after the other.

    ``frozen`` parts take their weights, their optimizer states, and the passing forward of a single
    layer. ``stages`` have the other parts; without any, nothing is stored for a backward.
    """
    last = order.n_stages - 1
    kept = {
        stage: model.total(parts, "kept") + (model.sent(parts) if stage < last and parts else 0)
        for stage, parts in stages.items()
    }
    between = {stage: model.total(p, "kept_between_halves") for stage, p in stages.items()}
    weights = sum(model.total(parts, "weights") for parts in stages.values())
    gradients = [model.total(parts, "gradients") for parts in stages.values()]
    present = {part for parts in stages.values() for part, n in parts.items() if n}
    messages = [
        (model.received(parts) if stage > 0 else 0) + (model.sent(parts) if stage < last else 0)
        for stage, parts in stages.items()
    ]
    return RankMemory(
        parameters=weights + model.total(frozen, "weights"),
        gradients=sum(gradients),
        optimizer=model.optimizer_states * (sum(gradients) + model.total(frozen, "gradients")),
        casts=sum(model.total(parts, "casts") for parts in (*stages.values(), frozen)),
        activations=peak_bytes(actions, kept.__getitem__, between.__getitem__),
        messages=order.n_microbatches * sum(messages) if last else 0,
        # The last: each stage has an optimizer of its own.
        scratch=max((model.part(part).largest_weight for part in present), default=0)
        + (2 * model.logits if last in stages else 0)
        + (max(model.recomputed, model.layer.kept) if frozen.get(LAYER) else model.recomputed)
        + model.update_copies * max(gradients),
        scores=sum(model.total(parts, "scores") for parts in (*stages.values(), frozen)),
    )


def cut_memory(
    model: ModelBytes, order: ScheduleOrder, rank: int, start: int, stop: int, n_frozen: int = 0
) -> RankMemory:
    """Return the memory of a rank with a single stage of layers ``start`` to before ``stop``.

    Of the model's front ``n_frozen`` layers are frozen, the embedding with them.
    """
    n_front = min(max(n_frozen - start, 0), stop - start)
    parts = parts_of(rank, order.n_stages, stop - start - n_front)
    frozen = {LAYER: n_front}
    if n_front and rank == 0:
        frozen[EMBEDDING] = parts.pop(EMBEDDING)
    live = {part: n for part, n in parts.items() if n}
    return rank_memory(model, {rank: live}, order.ranks[rank], order, frozen)


def peak_bytes(
    actions: Sequence[Action],
    kept: Callable[[int], int],
    kept_between_halves: Callable[[int], int],
) -> int:
    """Return the largest sum of bytes held by ``actions`` run one after the other.

    A forward leaves ``kept`` until its backward or weight backward is done, and an input backward
    adds ``kept_between_halves`` until then.
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
