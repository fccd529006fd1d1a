"""The endless stream of a data set's examples, and its rest when readers change."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class ShardAssignment(NamedTuple):
    """Readers of number g from an epoch on: part (g + shift) mod n_parts; any for a single part."""

    first_epoch: int = 0
    n_parts: int = 1
    shift: int = 0


@dataclass(frozen=True)
class ExampleStream:
    """Numbers of the examples unread when the readers began, ascending.

    Number g stands for the example at place g mod n of epoch g div n, in the order of that epoch; n
    is the number of examples. So a number means the same example for all readers. Of R readers, r
    takes every R-th number from the r-th on.

    All numbers from ``start`` on are in the stream, and of earlier numbers ``left``. Epochs are
    dealt by ``dealings``, in order; epochs before the first have a single part.
    """

    start: int = 0
    left: tuple[int, ...] = ()
    dealings: tuple[ShardAssignment, ...] = ()

    def number(self, place: int) -> int:
        """Return the number at ``place`` of the stream, from 0."""
        n_left = len(self.left)
        return self.left[place] if place < n_left else self.start + place - n_left

    def dealing(self, epoch: int) -> ShardAssignment:
        """Return how an epoch is dealt."""
        there = (dealing for dealing in reversed(self.dealings) if dealing.first_epoch <= epoch)
        return next(there, ShardAssignment())

    def in_parts(self, n_parts: int, n_examples: int) -> ExampleStream:
        """Return the stream with a part per reader, 1 for no parts.

        Epochs of ``n_examples`` stay as they are once something was read.
        """
        shift = (len(self.left) - self.start) % n_parts
        wanted = ShardAssignment(-(-self.start // n_examples), n_parts, shift)
        before = tuple(d for d in self.dealings if d.first_epoch < wanted.first_epoch)
        last = before[-1] if before else ShardAssignment()
        is_same = (last.n_parts, last.shift) == (n_parts, shift)
        return replace(self, dealings=before if is_same else (*before, wanted))


class ReaderPlace(NamedTuple):
    """Count of a reader's finished numbers, and the unfinished among them."""

    taken: int
    kept: Collection[int] = ()


def remaining(stream: ExampleStream, readers: Sequence[ReaderPlace]) -> ExampleStream:
    """Return the examples not handed out by all readers together, for any number of others."""
    n = len(readers)
    firsts = [r + n * reader.taken for r, reader in enumerate(readers)]
    end = max(*firsts, len(stream.left))
    unread = {stream.number(place) for first in firsts for place in range(first, end, n)}
    for reader in readers:
        unread.update(reader.kept)
    start, left = stream.number(end), sorted(unread)
    while left and left[-1] == start - 1:
        start = left.pop()
    return replace(stream, start=start, left=tuple(left))


class EpochOrder:
    """Maps numbers of the stream to examples of the data set.

    The order of an epoch is a permutation of ``indices`` drawn from ``(seed, epoch)``, or their own
    without a seed. Where epochs are dealt in parts, examples change places so that a part's readers
    find its own.
    """

    def __init__(self, indices: NDArray[np.int64], seed: int | None) -> None:
        self._indices = indices
        self._seed = seed
        self._orders: dict[tuple[int, ShardAssignment], NDArray[np.int64]] = {}

    def index(self, stream: ExampleStream, number: int) -> int:
        """Return the index of the example at ``number`` of ``stream``."""
        epoch, place = divmod(number, len(self._indices))
        key = epoch, stream.dealing(epoch)
        if key not in self._orders:
            # Two: where an epoch ends, numbers of both come in turn.
            self._orders = {**dict(list(self._orders.items())[-1:]), key: self._order(*key)}
        return int(self._indices[self._orders[key][place]])

    def _order(self, epoch: int, dealing: ShardAssignment) -> NDArray[np.int64]:
        order = self._permuted(epoch)
        if dealing.n_parts == 1:
            return order
        shift = epoch * len(order) + dealing.shift
        return in_parts(order, self._permuted(0), dealing.n_parts, shift)

    def _permuted(self, epoch: int) -> NDArray[np.int64]:
        """Return places in the list of examples."""
        n = len(self._indices)
        if self._seed is None:
            return np.arange(n, dtype=np.int64)
        # Seeded with both numbers: epochs then have unrelated orders, and none needs the last.
        return np.random.default_rng([self._seed, epoch]).permutation(n)


def in_parts(
    order: NDArray[np.int64], first: NDArray[np.int64], n_parts: int, shift: int
) -> NDArray[np.int64]:
    """Return ``order`` with examples moved to the readers of their parts.

    Place p of an epoch is read by the readers of part (p + shift) mod ``n_parts``, and example
    number p of ``first``, the same n in another order, belongs to part p mod ``n_parts``. The last
    n mod ``n_parts`` examples of ``first`` belong to no part, and go to parts with a further place
    in this epoch. Within a part examples keep the order of ``order``.
    """
    n = len(order)
    n_dealt = n - n % n_parts
    places = np.empty(int(first.max()) + 1, dtype=np.int64)
    places[first] = np.arange(n)
    home = places[order]
    readers = (np.arange(n) + shift) % n_parts
    parts = home % n_parts
    parts[home >= n_dealt] = readers[n_dealt:]
    moved = np.empty_like(order)
    moved[np.argsort(readers, kind="stable")] = order[np.argsort(parts, kind="stable")]
    return moved
