"""The cache of a frozen front along the steps: what to read, what to keep, its gain.

While the first blocks are frozen in every microbatch, their outputs for a row stay the same. The
rank of the first live block stores them, and reads all rows of a step's batches before the step;
all ranks learn which batches begin there. These pass by the stages in front. All other batches are
computed as ever, and their rows kept.

Where the front has grown, rows of shallower fronts stay as long as there is room. A batch begins
behind the deepest front with all of its rows.

Replicas have rows of their own and run through the same blocks: a batch begins behind a front only
where all replicas have their rows.
"""

import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from timelyfreeze.front.caching.folder import Row
from timelyfreeze.front.caching.front import Front, digests, fingerprint, front_of
from timelyfreeze.front.caching.store import ActivationStore
from timelyfreeze.front.caching.verdict import (
    N_COMPUTED,
    N_ENTERED,
    N_TIMED,
    CacheDecision,
    CacheUse,
    FrontTimes,
    verdict,
)
from timelyfreeze.policies import ModelLayout
from timelyfreeze.runtime import BatchEntry, Exchange
from timelyfreeze.schedule import Action, PipelineDag

logger = logging.getLogger(__name__)

N_AHEAD = 5  # batches whose rows are read ahead, or those of the next step if it has more


@dataclass
class _Kept:
    """A stored front, and its rows seen so far."""

    front: Front
    name: str  # a name that no other front has
    # measured times of batches through it and behind it
    times: FrontTimes = field(default_factory=FrontTimes)
    n_computed: int = 0  # batches that ran through it
    n_entered: int = 0  # batches that began behind it
    n_counted: int = 0  # those whose saving is in the sum
    has_read: bool = False  # whether some did in a step before this one
    is_decided: bool = False  # whether it is known if reading pays
    # what a batch saves and costs; None before, and where that cannot be told
    verdict: CacheDecision | None = None

    @property
    def is_off(self) -> bool:
        """Whether reading does not pay."""
        return self.verdict is not None and not self.verdict.pays


@dataclass(eq=False)
class FrontCache:
    """Reads and stores the outputs of a pipeline's frozen front.

    In every step all ranks call :meth:`begin_step`, :meth:`name_batches`, :meth:`entry` for all
    batches in turn, and :meth:`end_step`. After the second, any rank may call :meth:`read_ahead`.
    """

    store: ActivationStore  # keeps the rows of this rank
    layout: ModelLayout  # tensors of all ranks
    parameters: Mapping[str, Tensor]  # those of this rank, by name
    stages: Collection[int]  # indexes of those of this rank
    dag: PipelineDag  # graph of a batch
    exchange: Exchange  # talks to the other ranks
    identity: str  # what outputs depend on besides the front's weights and the tokens

    def __post_init__(self) -> None:
        """Begin without a front."""
        self._n_microbatches = 1 + max(action.microbatch for action in self.dag.actions)
        self._kept: _Kept | None = None
        self._older: list[_Kept] = []  # shallower fronts that have rows, the deepest first
        self._entries: list[BatchEntry | None] = []
        self._unread: deque[list[Mapping[Action, float]] | None] = deque()
        self._entered_in_step = 0
        self._all_batches = self._all_entered = 0
        self._spent_ms = 0.0
        self._saved_ms: float | None = None

    # -- the step ----------------------------------------------------------------------------------

    def begin_step(self, frozen: NDArray[np.bool_] | None) -> None:
        """Enter a step.

        ``frozen`` are the tensors of the layout frozen in all of its microbatches; None for none.
        """
        self._entries, self._entered_in_step = [], 0
        front = None if frozen is None else front_of(self.layout, frozen)
        if front == (None if self._kept is None else self._kept.front):
            return
        with self._spending():
            if front is None:
                self._kept, self._older = None, []
                self.store.begin(None)
            else:
                self._begin(front)

    def name_batches(self, batches: Sequence[Sequence[Row]]) -> None:
        """Name the rows of this replica's batches in order, and look for stored ones.

        Without names a step is computed. A collective call of all ranks.
        """
        kept = self._kept
        if kept is None or kept.is_off:
            return
        # The first batches at a depth are computed, to know what that takes.
        choices = [kept, *self._older] if kept.n_computed >= N_COMPUTED else []
        there = self._agreed([[self._has(front, batch) for front in choices] for batch in batches])
        fronts = [next(compress(choices, of_batch), None) for of_batch in there]
        inputs = [
            None if front is None else self._read(front, batch)
            for front, batch in zip(fronts, batches, strict=True)
        ]
        if any(fronts):
            # What was there may turn out to be cut.
            read = self._agreed(
                [
                    [None if front is None or not self._is_here(front) else part is not None]
                    for front, part in zip(fronts, inputs, strict=True)
                ]
            )
            fronts = [
                front if whole else None for front, (whole,) in zip(fronts, read, strict=True)
            ]
        for batch, front, part in zip(batches, fronts, inputs, strict=True):
            start = None if front is None else front.front.end
            entry = BatchEntry(start, part or {})
            if start != kept.front.end:
                entry = replace(entry, tapped=kept.front.end, tap=partial(self._keep, batch))
            self._entries.append(entry)

    def read_ahead(self, upcoming: Callable[[int], Sequence[Sequence[int]]]) -> None:
        """Have rows of the batches behind the named ones read from the disk during the step.

        ``upcoming`` returns the rows of so many batches, fewer where there are no more.
        """
        kept = self._kept
        if kept is None or kept.is_off or kept.n_computed < N_COMPUTED:
            return
        # Not before the first is read: the batches that are timed would find all rows read, and
        # later ones would not, where a disk is slower than the training.
        reads = kept.has_read or any(e and e.start == kept.front.end for e in self._entries)
        fronts = [kept, *self._older] if reads else self._older
        mine = [front.name for front in fronts if self._is_here(front)]
        if mine:
            with self._spending():
                self.store.read_ahead(mine, upcoming(max(N_AHEAD, len(self._entries))))

    def entry(self, number: int) -> BatchEntry | None:
        """Return, once, where batch ``number`` of the step, from 0, enters the model."""
        entry, kept, of_kind = None, self._kept, None
        if number < len(self._entries):
            entry, self._entries[number] = self._entries[number], None
        if kept is not None:
            start = None if entry is None else entry.start
            self._all_batches += 1
            self._all_entered += start is not None
            if start is None:
                kept.n_computed += 1
                of_kind = kept.times.computed
            elif start == kept.front.end:
                kept.n_entered += 1
                self._entered_in_step += 1
                of_kind = kept.times.entered
        self._unread.append(of_kind)
        return entry

    def add_times(self, durations_ms: Mapping[Action, float]) -> None:
        """Note the times of a batch, in the order of :meth:`entry`."""
        of_kind = self._unread.popleft()
        if of_kind is not None and len(of_kind) < N_TIMED:
            of_kind.append(durations_ms)

    def end_step(self, drain: Callable[[], None]) -> None:
        """Leave the step, and decide whether reading pays as soon as enough batches were timed.

        Every rank must call this together. ``drain`` adds the times of all batches so far.
        """
        kept = self._kept
        if kept is None:
            return
        # Enough batches of both kinds were timed; the same on all ranks.
        is_known = kept.n_computed >= N_COMPUTED and kept.n_entered >= N_ENTERED and kept.has_read
        if self._entered_in_step and is_known and not kept.is_decided:
            drain()
            self._decide(kept)
        kept.has_read = kept.has_read or self._entered_in_step > 0
        if kept.verdict is not None:
            # Those before the verdict count as soon as it is known what each of them saved.
            n_new, kept.n_counted = kept.n_entered - kept.n_counted, kept.n_entered
            self._saved_ms = (self._saved_ms or 0.0) + n_new * kept.verdict.saved_ms

    def use(self) -> CacheUse:
        """Return this rank's use of the cache so far."""
        return CacheUse(
            self._all_batches,
            self._all_entered,
            self.store.memory_used,
            self.store.disk_used,
            self._spent_ms,
            self._saved_ms,
            self.store.n_ahead,
        )

    def close(self) -> None:
        """Write waiting rows, and release the folder."""
        self.store.close()

    # -- parts -------------------------------------------------------------------------------------

    def _decide(self, kept: _Kept) -> None:
        """Go on or stop reading at this depth; times of all batches have been added."""
        kept.is_decided = True
        everyone = self.exchange.all_gather(kept.times.summary())
        kept.verdict = verdict(self.dag, everyone, kept.front.end.stage)
        if kept.verdict is None:
            return
        if kept.is_off:
            self._older = []
            self.store.begin(None)
        if self.exchange.rank != 0:
            return
        logger.info(
            "Activation cache, %d blocks frozen: reading takes %.2f ms a batch and saves %.2f ms; "
            "%s",
            kept.front.depth,
            kept.verdict.read_ms,
            kept.verdict.saved_ms,
            "it stays on" if kept.verdict.pays else "it is off until the depth changes",
        )

    def _begin(self, front: Front) -> None:
        """Store rows of a front, and stored rows of shallower fronts with its weights."""
        writer = socket.gethostname() if front.end.stage in self.stages else None
        mine = digests(front.names, self.parameters), self.store.fronts(), writer
        told, there, writers = zip(*self.exchange.all_gather(mine), strict=True)
        shallower = (
            front_of(self.layout, self.layout.prefix(depth))
            for depth in range(front.depth - 1, 0, -1)
        )
        self._kept, *older = (
            _Kept(each, fingerprint(each, told, self.identity))
            for each in (front, *shallower)
            if each is not None
        )
        self._older = [each for each in older if each.name in set().union(*there)]
        part = 0.0 if writer is None else 1.0 / writers.count(writer)
        self.store.begin(self._kept.name, [each.name for each in self._older], part)

    def _is_here(self, front: _Kept) -> bool:
        """Return whether this rank holds the first block behind a front, and so its rows."""
        return front.front.end.stage in self.stages

    def _has(self, front: _Kept, batch: Sequence[Row]) -> bool | None:
        """Return whether all rows of a batch seem to be there; None where they cannot be."""
        if not self._is_here(front):
            return None
        return all(self.store.has(front.name, row) for row in batch)

    def _agreed(self, mine: list[list[bool | None]]) -> list[list[bool]]:
        """Return the answers per batch common to all ranks with an answer."""
        everyone: list[list[list[bool | None]]] = self.exchange.all_gather(mine)
        return [
            [True in of_all and False not in of_all for of_all in zip(*of_batch, strict=True)]
            for of_batch in zip(*everyone, strict=True)
        ]

    def _read(self, kept: _Kept, batch: Sequence[Row]) -> dict[int, Tensor] | None:
        """Return the inputs of a batch's microbatches; None where not all of them are held."""
        if not self._is_here(kept):
            return None
        started = time.perf_counter()
        with self._spending():
            outputs = [self.store.read(kept.name, row) for row in batch]
            whole = [output for output in outputs if output is not None]
            if len(whole) < len(batch):
                return None
            size = len(batch) // self._n_microbatches
            parts = [whole[first : first + size] for first in range(0, len(batch), size)]
            inputs = {microbatch: torch.stack(part) for microbatch, part in enumerate(parts)}
        # In the first step that reads, nothing was read ahead.
        if kept.has_read and len(kept.times.read_ms) < N_ENTERED:
            kept.times.read_ms.append(1e3 * (time.perf_counter() - started))
        return inputs

    def _keep(self, batch: Sequence[Row], microbatch: int, outputs: Tensor) -> None:
        """Store the front's outputs in a microbatch of ``batch``."""
        with self._spending():
            size = len(outputs)
            rows = batch[microbatch * size : (microbatch + 1) * size]
            self.store.offer(rows, outputs)

    @contextmanager
    def _spending(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._spent_ms += 1e3 * (time.perf_counter() - started)
