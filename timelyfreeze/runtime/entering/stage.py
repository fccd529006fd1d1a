"""A pipeline stage in which a batch can begin, or which it can pass by.

Every message between two stages that a batch passes by, or begins behind, is left out on both
sides. So nobody waits for one, whatever the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn, no_grad
from torch.distributed.pipelining import PipelineStage

from timelyfreeze.runtime.entering.entry import (
    AT_THE_FRONT,
    EMBEDDING,
    LAYERS,
    BatchEntry,
    StageBlocks,
)


def _nobody(microbatch: int, hidden: Tensor) -> None:
    """Listen to nothing."""


class EnteringStage(PipelineStage):
    """Pipeline stage that a batch may enter at any block, or not at all.

    What leaves no trace while :meth:`enter` has set nothing.
    """

    forwarding: int | None = None  # microbatch whose forward runs now, in training
    n_rows: int | None = None  # of a microbatch, once one has run in training
    _entry: BatchEntry = AT_THE_FRONT
    _front: StageBlocks | None = None
    _forwarded = -1

    def enter(self, entry: BatchEntry) -> None:
        """Set where the coming batch enters the model, whose front it would be otherwise."""
        self._entry = entry
        self._front = self.blocks

    @property
    def blocks(self) -> StageBlocks:
        """The blocks of the stage's module; raises as :meth:`find_blocks`."""
        return self._front or self.find_blocks()

    def find_blocks(self, layers: str = LAYERS, embedding: str = EMBEDDING) -> StageBlocks:
        """Look up where the stage's module can begin, and return it."""
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
        return self._active and self._entry.passes_by(self.stage_index)

    @property
    def _begins(self) -> bool:
        """Whether the batch begins in this stage."""
        return self._active and self._entry.begins_at(self.stage_index)

    @contextmanager
    def _noted(self, microbatch: int) -> Iterator[None]:
        """Say which microbatch's forward runs."""
        self.forwarding = microbatch if self._active else None
        try:
            yield
        finally:
            self.forwarding = None

    def forward_alone(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the module on a microbatch of a batch that passes by this stage, without a trace."""
        with no_grad():
            output: Tensor = self.submod(*args, **kwargs)
        return output

    def _entry_input(self, microbatch: int) -> Tensor:
        return self._entry.inputs[microbatch].to(self.device, non_blocking=True)

    def _begin_forward(self, microbatch: int) -> None:
        """Note which microbatch runs; where the batch begins here, its input has come."""
        self._forwarded = microbatch
        if self._begins and not self.is_first:
            super().set_local_fwd_input(self._entry_input(microbatch), microbatch)

    def _entering(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what the module gets: in a first stage hidden states in place of tokens."""
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
        """Return what the module's forward runs in: its first blocks left out, or watched."""
        entry, front = self._entry, self._front
        if front is None or not self._active:
            return nullcontext()
        start, tapped = (
            place.n_blocks if place is not None and place.stage == self.stage_index else None
            for place in (entry.start, entry.tapped)
        )
        if start is None and tapped is None:
            return nullcontext()
        return front.cut(start, tapped, partial(entry.tap or _nobody, self._forwarded))

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        """Receive a microbatch's input; where the batch begins here, wait for it instead."""
        if self._begins:
            self._entry.wait_for(fwd_chunk_id)  # here, so that no action's time has the wait
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
