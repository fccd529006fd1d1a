"""Lets no live stage end a batch before the front has forwarded the one that follows.

A front that is not ahead then keeps the live stages waiting, and the run fails.
"""

from datetime import timedelta

from torch.distributed.distributed_c10d import _get_default_store

from timelyfreeze.runtime.entering.ahead import FrontRunAhead
from timelyfreeze.runtime.stage import FreezingStage

_begin, _feed, _backward = (
    FrontRunAhead.begin_batch,
    FrontRunAhead._feed,
    FreezingStage.backward_one_chunk,
)
LIMIT = timedelta(seconds=60)


def begin_batch(self, microbatches, *, is_followed):
    self.n_begun = getattr(self, "n_begun", 0) + (self.n_front > 0)
    is_gate = is_followed and 0 < self.n_front <= self._stage.stage_index
    self._stage.waits_for = self.n_begun + 1 if is_gate else None
    self._stage.last_microbatch = self._n_microbatches - 1
    _begin(self, microbatches, is_followed=is_followed)


def feed(self, microbatches):
    _feed(self, microbatches)
    if self._stage.stage_index == self.n_front - 1:
        _get_default_store().set(f"fed {self.n_begun + self._is_fed}", "")


def backward_one_chunk(self, bwd_chunk_id, *args, **kwargs):
    wanted = getattr(self, "waits_for", None)
    if wanted is not None and bwd_chunk_id == self.last_microbatch:
        _get_default_store().wait([f"fed {wanted}"], LIMIT)
    _backward(self, bwd_chunk_id, *args, **kwargs)


FrontRunAhead.begin_batch, FrontRunAhead._feed = begin_batch, feed
FreezingStage.backward_one_chunk = backward_one_chunk
