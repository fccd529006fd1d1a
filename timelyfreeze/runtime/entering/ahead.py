"""A frozen front at work ahead: its stages forward batches before the live stages.

Such stages have no backward and constant weights. So they leave the schedule: every batch begins
behind them (:class:`BatchEntry`), and their outputs go to the first live stage in separate
messages. The front begins the next batch without waiting for the present.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from timelyfreeze.runtime.entering.stage import BatchEntry, BlockPlace, EnteringStage

# Positional and named arguments of the stage's module, for each microbatch of a batch.
Microbatches = Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]


class FrontRunAhead:
    """A rank's part in a front at most one batch ahead.

    All ranks call :meth:`begin_step` in every step, and :meth:`begin_batch`, :meth:`entry` and
    :meth:`end_batch` for all of its batches, with the same numbers. The first batch of a process
    runs as usual: then all stages know the shape of their input. ``group`` has the pipeline's
    ranks, in order, for these messages alone, so none come between the schedule's.
    """

    def __init__(self, stage: EnteringStage, n_microbatches: int, group: dist.ProcessGroup) -> None:
        self._stage = stage
        self._n_microbatches = n_microbatches
        self._group = group
        self._shape: tuple[torch.Size, torch.dtype] | None = None
        self._has_run = False
        self._inlet: Receiver | None = None
        self._n_announced = 0  # batches from the current one on whose messages are expected
        self._is_fed = False  # whether this rank has forwarded the current batch
        self.n_front = 0  # how many stages are in front of the current step's batches; 0 for none

    def begin_step(self, n_front: int) -> None:
        """Enter a step with ``n_front`` first stages frozen whole.

        When the number changes, no batch may be ahead.
        """
        is_front = self._has_run and n_front < self._stage.num_stages
        n_front = n_front if is_front else 0
        if n_front != self.n_front:
            assert self._n_announced == 0, "the front has changed while it was ahead"
            self.n_front = n_front
            self._inlet = self._new_inlet()

    def begin_batch(self, microbatches: Callable[[], Microbatches], *, is_followed: bool) -> None:
        """Enter a batch; in front, forward the batch unless done.

        ``microbatches`` returns the module's outside inputs, and is only called in front.
        ``is_followed`` tells whether another batch with the same front is known to follow.
        """
        if not self.n_front:
            return
        n_batches = 1 + is_followed
        if self._inlet is not None:
            self._inlet.expect((n_batches - self._n_announced) * self._n_microbatches)
        self._n_announced = n_batches
        if not self._is_fed:
            self._feed(microbatches)

    def entry(self, number: int) -> BatchEntry | None:
        """Return where the current batch, of any number, enters the model."""
        if not self.n_front:
            return None
        is_first_live = self._stage.stage_index == self.n_front
        inputs = _Arriving(self._inlet) if is_first_live and self._inlet is not None else {}
        return BatchEntry(BlockPlace(self.n_front, 0), inputs)

    def end_batch(self, microbatches: Callable[[], Microbatches] | None = None) -> None:
        """Leave a batch; in front, forward the next step's batch.

        ``microbatches`` are the next batch's, None to forward nothing yet.
        """
        if not self._has_run:
            self._has_run = True
            if not self._stage.is_first:
                (received,) = self._stage.args_recv_info[0]
                # Since torch 2.15 there is a buffer only while a message is under way.
                self._shape = received.tensor_meta.shape, received.tensor_meta.dtype
        if not self.n_front:
            return
        self._n_announced -= 1
        self._is_fed = microbatches is not None
        if microbatches is not None:
            self._feed(microbatches)

    def _feed(self, microbatches: Callable[[], Microbatches]) -> None:
        """In front, forward a batch and send its outputs: the next is computed during a send."""
        index = self._stage.stage_index
        if index >= self.n_front:
            return
        leaving: Arrival | None = None
        for args, kwargs in microbatches():
            inputs = args if self._inlet is None else (self._inlet.take(),)
            output = self._stage.forward_alone(*inputs, **kwargs).contiguous()
            if leaving is not None:
                leaving[1].wait()
            work = dist.isend(output, self._rank(index + 1), group=self._group)
            assert work is not None  # this rank is in the group
            leaving = output, work
        if leaving is not None:
            leaving[1].wait()

    def _new_inlet(self) -> Receiver | None:
        """Return the inlet of the front's messages on this rank; None without."""
        index = self._stage.stage_index
        if not 0 < index <= self.n_front:
            return None
        # A batch is how far the front can be ahead.
        room = self._n_microbatches if index == self.n_front else 1
        return Receiver(partial(self._receive, self._rank(index - 1)), room)

    def _receive(self, source: int) -> Arrival:
        assert self._shape is not None  # a batch has run
        shape, dtype = self._shape
        message = torch.empty(shape, dtype=dtype, device=self._stage.device)
        work = dist.irecv(message, source, group=self._group)
        assert work is not None  # this rank is in the group
        return message, work

    def _rank(self, stage_index: int) -> int:
        """Return the process of a stage: ranks have a stage each, in order."""
        return int(dist.get_global_rank(self._group, stage_index))


class _Arriving(dict[int, Tensor]):
    """Inputs of microbatches, taken in order and waited for on demand."""

    def __init__(self, inlet: Receiver) -> None:
        super().__init__()
        self._inlet = inlet

    def __missing__(self, microbatch: int) -> Tensor:
        assert microbatch == len(self), "microbatches are forwarded in their order"
        self[microbatch] = self._inlet.take()
        return self[microbatch]


# Room for one message, and what tells when it is there.
Arrival = tuple[Tensor, dist.Work]


class Receiver:
    """Receives messages ahead of whoever takes them; its room is how far a sender can be ahead."""

    def __init__(self, receive: Callable[[], Arrival], room: int) -> None:
        self._receive = receive
        self._room = room
        self._awaited = 0
        self._arriving: deque[Arrival] = deque()

    def expect(self, n_messages: int) -> None:
        """Announce further messages."""
        self._awaited += n_messages
        self._fill()

    def take(self) -> Tensor:
        """Return the next message, after a wait if necessary."""
        message, work = self._arriving.popleft()
        self._fill()
        work.wait()
        return message

    def _fill(self) -> None:
        while self._awaited and len(self._arriving) < self._room:
            self._arriving.append(self._receive())
            self._awaited -= 1
