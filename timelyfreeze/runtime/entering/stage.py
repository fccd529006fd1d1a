"""A pipeline stage where a batch can begin, or pass by.

A frozen front's output for a row never changes. With known outputs the batch begins at the first
live block: stages in front neither compute nor send.

Messages between stages in front of the entry are left out on both sides. So nobody waits for a
message, under any schedule.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn, no_grad
from torch.distributed.pipelining import PipelineStage

LAYERS, EMBEDDING = "layers", "tok_embeddings"

# Called with a microbatch and what entered a block in it, shape [rows, T, d].
Tap = Callable[[int, Tensor], None]


class BlockPlace(NamedTuple):
    """A place in front of a block."""

    stage: int  # the stage that holds the block
    n_blocks: int  # how many of the stage's blocks lie in front of it


@dataclass(frozen=True)
class BatchEntry:
    """How the coming batch runs through a pipeline whose front is frozen."""

    start: BlockPlace | None = None  # where it begins; None for the front
    # by microbatch, what the block at ``start`` gets, shape [rows, T, d]; empty on processes that
    # do not hold its stage. Looking one up may wait for it
    inputs: Mapping[int, Tensor] = field(default_factory=dict)
    tapped: BlockPlace | None = None  # where ``tap`` listens, not before ``start``
    tap: Tap = lambda microbatch, hidden: None  # told what comes by there


AT_THE_FRONT = BatchEntry()


class StageBlocks:
    """The transformer blocks of a stage's module, able to leave out the first in a forward.

    TorchTitan's models run through the blocks in ``layers``, and look up tokens where
    ``tok_embeddings`` is not None: TorchTitan cuts stages so, and a stage is cut here so for the
    length of a forward.
    """

    def __init__(self, module: nn.Module, layers: str = LAYERS, embedding: str = EMBEDDING) -> None:
        blocks = getattr(module, layers, None)
        if not isinstance(blocks, nn.ModuleDict):
            raise ValueError(
                f"the activation cache needs a model whose blocks are in an nn.ModuleDict "
                f"{layers!r}; {type(module).__name__} has none"
            )
        self._module = module
        self._layers = blocks
        self._names = layers, embedding

    @property
    def n_blocks(self) -> int:
        """How many blocks there are."""
        return len(self._layers)

    @property
    def embedding(self) -> nn.Module | None:
        """The embedding; None where there is none."""
        return getattr(self._module, self._names[1], None)

    def first(self, n_blocks: int) -> set[nn.Module]:
        """Return the embedding, if here, the first blocks, and their parameters."""
        parts = [self.embedding, *list(self._layers.values())[:n_blocks]]
        return {inner for part in parts if part is not None for inner in part.modules()}

    @contextmanager
    def cut(
        self, start: int | None, tapped: int | None, tell: Callable[[Tensor], None]
    ) -> Iterator[None]:
        """Run the module without its first blocks, and listen in front of another block.

        ``start`` blocks are left out, the embedding with them, and ``tell`` gets the output of
        ``tapped`` blocks, at least as many; None for no cut, and for no listening.
        """
        blocks: list[tuple[str, nn.Module]] = list(self._layers.items())
        if tapped is not None:
            blocks.insert(tapped, ("tap", _Tap(tell)))
        layers, embedding = self._names
        replaced = {layers: nn.ModuleDict(blocks[start or 0 :])}
        if start is not None:
            replaced[embedding] = None
        before = {name: getattr(self._module, name, None) for name in replaced}
        try:
            for name, part in replaced.items():
                setattr(self._module, name, part)
            yield
        finally:
            for name, part in before.items():
                setattr(self._module, name, part)


class _Tap(nn.Module):
    """A block without any effect."""

    def __init__(self, tell: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._tell = tell

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._tell(hidden)
        return hidden


class FrozenBlocks:
    """The blocks of a stage's module, none without ``layers``, possibly frozen in front."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        layers, parts = getattr(module, LAYERS, None), {}
        if isinstance(layers, nn.ModuleDict):
            parts = {f"{LAYERS}.{name}.": block for name, block in layers.items()}
            if (embedding := getattr(module, EMBEDDING, None)) is not None:
                parts = {f"{EMBEDDING}.": embedding, **parts}
        self._blocks = [
            (part, np.flatnonzero([name.startswith(prefix) for name in names]))
            for prefix, part in parts.items()
        ]

    def first(self, mask: NDArray[np.bool_]) -> list[nn.Module]:
        """Return the embedding and the blocks in front of the first live tensor of them."""
        return [block for block, _ in takewhile(lambda pair: mask[pair[1]].all(), self._blocks)]

    @contextmanager
    def without_graph(self, mask: NDArray[np.bool_]) -> Iterator[None]:
        """Run the module's frozen first blocks without keeping anything for a backward."""
        with ExitStack() as restored:
            for block in self.first(mask):
                # What is not a method of its class comes back, else the method.
                if "forward" in vars(block):
                    restored.callback(setattr, block, "forward", block.forward)
                else:
                    restored.callback(delattr, block, "forward")
                block.forward = no_grad()(block.forward)
            yield


class EnteringStage(PipelineStage):
    """Pipeline stage entered by a batch at any block, or not at all, by :meth:`enter`."""

    forwarding: int | None = None  # microbatch whose forward runs now, in training
    n_rows: int | None = None  # of a microbatch, once one has run in training
    _entry: BatchEntry = AT_THE_FRONT
    _front: StageBlocks | None = None
    _forwarded = -1

    def enter(self, entry: BatchEntry) -> None:
        """Set the entry of the coming batch into the model."""
        self._entry = entry
        self._front = self.blocks

    @property
    def blocks(self) -> StageBlocks:
        """The blocks of the stage's module; raises as :meth:`find_blocks`."""
        return self._front or self.find_blocks()

    def find_blocks(self, layers: str = LAYERS, embedding: str = EMBEDDING) -> StageBlocks:
        """Find and return the possible entries of the stage's module."""
        front = StageBlocks(self.submod, layers, embedding)
        if self.is_first and front.embedding is None:
            raise ValueError(
                f"the activation cache needs a first stage whose embedding is {embedding!r}; "
                f"{type(self.submod).__name__} has none"
            )
        self._front = front
        return front

    @property
    def _active(self) -> bool:
        """Whether this is training."""
        return bool(self.has_backward)

    @property
    def _is_passed(self) -> bool:
        """Whether the batch begins behind this stage."""
        start = self._entry.start
        return self._active and start is not None and self.stage_index < start.stage

    @property
    def _begins(self) -> bool:
        """Whether the batch begins in this stage, at its first block or inside."""
        start = self._entry.start
        return self._active and start is not None and self.stage_index == start.stage

    @contextmanager
    def _noted(self, microbatch: int) -> Iterator[None]:
        """Note the microbatch of the running forward; at the batch's entry, its input has come."""
        self._forwarded = microbatch
        self.forwarding = microbatch if self._active else None
        try:
            if self._begins and not self.is_first:
                super().set_local_fwd_input(self._entry_input(microbatch), microbatch)
            yield
        finally:
            self.forwarding = None

    def forward_alone(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the module on a microbatch of a batch passing by, without a trace."""
        with no_grad():
            output: Tensor = self.submod(*args, **kwargs)
        return output

    def _entry_input(self, microbatch: int) -> Tensor:
        return self._entry.inputs[microbatch].to(self.device, non_blocking=True)

    def _entering(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the module's input: in a first stage hidden states in place of tokens."""
        if self._begins and self.is_first:
            args = (self._entry_input(self._forwarded), *args[1:])
        if self._active and args and isinstance(args[0], Tensor):
            self.n_rows = len(args[0])
        return args

    def _left_out(self) -> set[nn.Module]:
        """Return the modules of this stage in front of the block where the batch begins."""
        start = self._entry.start
        if start is None or self._front is None or not self._begins:
            return set()
        return self._front.first(start.n_blocks)

    def _entered(self) -> AbstractContextManager[None]:
        """Return the context of the module's forward: its first blocks left out, or watched."""
        entry, front = self._entry, self._front
        if front is None or not self._active:
            return nullcontext()
        start, tapped = (
            place.n_blocks if place is not None and place.stage == self.stage_index else None
            for place in (entry.start, entry.tapped)
        )
        if start is None and tapped is None:
            return nullcontext()
        return front.cut(start, tapped, partial(entry.tap, self._forwarded))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Receive a microbatch's input; at the batch's entry, wait for the stored input instead."""
        if self._begins:
            _ = self._entry.inputs[fwd_chunk_id]  # here, so that no action's time has the wait
            return []
        return [] if self._is_passed else super().get_fwd_recv_ops(fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Send a microbatch's output, unless the batch begins behind this stage."""
        return [] if self._is_passed else super().get_fwd_send_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Receive a microbatch's gradient, unless the batch begins behind this stage."""
        return [] if self._is_passed else super().get_bwd_recv_ops(bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        """Send a microbatch's input gradient, unless the batch begins here or behind."""
        if not self._begins and not self._is_passed:
            return super().get_bwd_send_ops(bwd_chunk_id)
        self.bwd_cache.pop(bwd_chunk_id)
        return []

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take a same-rank stage's output, unless the batch begins here or behind."""
        if not self._begins and not self._is_passed:
            super().set_local_fwd_input(prev_stage_outputs, mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Take a same-rank stage's input gradient, unless the batch begins behind this stage."""
        if not self._is_passed:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
