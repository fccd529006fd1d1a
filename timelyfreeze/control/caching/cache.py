"""The cache of a frozen front, along the steps: what to read, what to keep, whether it pays.

While the first blocks are frozen in every microbatch, what they put out for a row stays the same.
The rank that holds the first live block keeps it, and reads all rows of a step's batches before the
step; one exchange tells every rank which of the batches begin there. Such a batch passes by the
stages in front. All other batches are computed as ever, and their rows kept.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from timelyfreeze.control.caching.entries import Row
from timelyfreeze.control.caching.front import Front, digests, fingerprint, front_of
from timelyfreeze.control.caching.store import ActivationStore
from timelyfreeze.control.caching.use import CacheUse
from timelyfreeze.control.caching.verdict import N_COMPUTED, N_ENTERED, FrontTimes, Verdict, verdict
from timelyfreeze.policies import ModelLayout
from timelyfreeze.runtime import BatchEntry, Exchange
from timelyfreeze.schedule import Action, PipelineDag

logger = logging.getLogger(__name__)


class FrontCache:
    """Reads and keeps what the frozen front of a pipeline puts out.

    In every step all ranks call :meth:`begin_step`, :meth:`name_batches`, :meth:`entry` for each
    batch in turn, and :meth:`end_step`.

    Args:
        store: Of this rank.
        layout: The tensors of the model.
        parameters: Values of this rank's tensors, by name.
        stages: Indexes of the stages that this rank holds.
        dag: The pipeline's graph.
        exchange: Talks to the other ranks.
        identity: What outputs depend on besides the front's weights and the tokens.
    """

    def __init__(
        self,
        store: ActivationStore,
        layout: ModelLayout,
        parameters: Mapping[str, Tensor],
        stages: Sequence[int],
        dag: PipelineDag,
        exchange: Exchange,
        identity: str,
    ) -> None:
        self._store = store
        self._layout = layout
        self._parameters = parameters
        self._stages = frozenset(stages)
        self._dag = dag
        self._n_microbatches = 1 + max(action.microbatch for action in dag.actions)
        self._exchange = exchange
        self._identity = identity
        self._front: Front | None = None
        self._entries: list[BatchEntry | None] = []
        self._unread: deque[tuple[FrontTimes, bool]] = deque()
        self._times = FrontTimes()
        self._n_batches = self._n_entered = 0  # of this front
        self._entered_in_step = 0
        self._verdict: Verdict | None = None
        self._is_decided = False
        self._all_batches = self._all_entered = 0
        self._spent_ms = 0.0
        self._saved_ms: float | None = None

    # -- the step ----------------------------------------------------------------------------------

    def begin_step(self, frozen: NDArray[np.bool_] | None) -> None:
        """Enter a step.

        Args:
            frozen: Which of the layout's tensors are frozen in all of its microbatches, bool;
                None if nothing is.
        """
        self._entries, self._entered_in_step = [], 0
        front = None if frozen is None else front_of(self._layout, frozen)
        if front == self._front:
            return
        self._front = front
        self._times = FrontTimes()
        self._n_batches = self._n_entered = 0
        self._verdict, self._is_decided = None, False
        with self._spending():
            self._store.begin(None if front is None else self._name_of(front))

    def name_batches(self, batches: Sequence[Sequence[Row]]) -> None:
        """Say which rows the step's batches have, in their order, and see which are there.

        A step whose batches nobody names is computed. Every rank must call this together.
        """
        front = self._front
        if front is None or (self._verdict is not None and not self._verdict.pays):
            return
        mine: list[list[Tensor] | None] | None = None
        if front.stage in self._stages:
            mine = [self._read(batch) for batch in batches]
        told = None if mine is None else [found is not None for found in mine]
        everyone: list[list[bool] | None] = self._exchange.all_gather(told)
        found = next(answer for answer in everyone if answer is not None)
        for place, is_there in enumerate(found):
            outputs = None if mine is None else mine[place]
            self._entries.append(self._entry(front, batches[place], is_there, outputs))

    def entry(self, number: int) -> BatchEntry | None:
        """Return, once, where batch ``number`` of the step, from 0, enters the model."""
        entry = None
        if number < len(self._entries):
            entry, self._entries[number] = self._entries[number], None
        is_entered = entry is not None and entry.cuts
        if self._front is not None:
            self._all_batches += 1
            self._n_batches += 1
            self._all_entered += is_entered
            self._n_entered += is_entered
            self._entered_in_step += is_entered
        self._unread.append((self._times, is_entered))
        return entry

    def add_times(self, durations_ms: Mapping[Action, float]) -> None:
        """Take note of the times of a batch, which come in the order of :meth:`entry`."""
        times, is_entered = self._unread.popleft()
        of_kind, most = (times.entered, N_ENTERED) if is_entered else (times.computed, N_COMPUTED)
        if len(of_kind) < most:
            of_kind.append(durations_ms)

    @property
    def needs_times(self) -> bool:
        """Whether it can be decided now whether reading pays; the same on all ranks."""
        n_computed = self._n_batches - self._n_entered
        enough = n_computed >= N_COMPUTED and self._n_entered >= N_ENTERED
        return enough and not self._is_decided

    def decide(self) -> None:
        """Go on or stop reading at this depth; every rank must call this together.

        Times of all batches must have been added.
        """
        assert self._front is not None  # batches were entered
        self._is_decided = True
        self._verdict = verdict(self._dag, self._exchange.all_gather(self._times.summary()))
        if self._verdict is None:
            return
        if not self._verdict.pays:
            self._store.begin(None)
        if self._exchange.rank != 0:
            return
        logger.info(
            "Activation cache, %d blocks frozen: reading takes %.2f ms a batch and saves %.2f ms; "
            "%s",
            self._front.depth,
            self._verdict.read_ms,
            self._verdict.saved_ms,
            "it stays on" if self._verdict.pays else "it is off until the depth changes",
        )

    def end_step(self) -> None:
        """Leave the step."""
        if self._verdict is not None:
            self._saved_ms = self._saved_ms or 0.0
            self._saved_ms += self._entered_in_step * self._verdict.saved_ms

    def use(self) -> CacheUse:
        """Return what this rank had of the cache so far."""
        return CacheUse(
            self._all_batches,
            self._all_entered,
            self._store.memory_used,
            self._store.disk_used,
            self._spent_ms,
            self._saved_ms,
        )

    def close(self) -> None:
        """Write what waits, and let go of the folder."""
        self._store.close()

    # -- parts -------------------------------------------------------------------------------------

    def _name_of(self, front: Front) -> str:
        mine = digests(front.names, self._parameters)
        everyone = self._exchange.all_gather(mine)
        together = {name: digest for rank in everyone for name, digest in rank.items()}
        return fingerprint(front, together, self._identity)

    def _read(self, batch: Sequence[Row]) -> list[Tensor] | None:
        """Return the inputs of a batch's microbatches; None if a row is missing.

        The first batches at a depth are computed, to know what that takes.
        """
        n_computed = self._n_batches - self._n_entered
        if n_computed < N_COMPUTED or not all(self._store.has(row) for row in batch):
            return None
        started = time.perf_counter()
        with self._spending():
            outputs = [self._store.read(row) for row in batch]
            whole = [output for output in outputs if output is not None]
            if len(whole) < len(batch):
                return None
            size = len(batch) // self._n_microbatches
            inputs = [
                torch.stack(whole[first : first + size]) for first in range(0, len(batch), size)
            ]
        if len(self._times.read_ms) < N_ENTERED:
            self._times.read_ms.append(1e3 * (time.perf_counter() - started))
        return inputs

    def _entry(
        self, front: Front, batch: Sequence[Row], is_there: bool, outputs: list[Tensor] | None
    ) -> BatchEntry:
        if is_there:
            inputs = dict(enumerate(outputs or ()))
            return BatchEntry(front.stage, front.n_blocks, cuts=True, inputs=inputs)
        return BatchEntry(front.stage, front.n_blocks, tap=partial(self._keep, batch))

    def _keep(self, batch: Sequence[Row], microbatch: int, outputs: Tensor) -> None:
        """Store what the front puts out in one microbatch of ``batch``."""
        with self._spending():
            size = len(outputs)
            rows = batch[microbatch * size : (microbatch + 1) * size]
            self._store.offer(rows, outputs)

    @contextmanager
    def _spending(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._spent_ms += 1e3 * (time.perf_counter() - started)
