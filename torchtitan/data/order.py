"""The order of an epoch's examples, which can let each reader have the same ones every time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.stream import Dealing, ExampleStream


class EpochOrder:
    """Says which example of the data set a number of the stream stands for.

    The order of an epoch is a permutation drawn from ``(seed, epoch)``. Where the stream's epochs
    are dealt in parts, examples change places in it so that each part's readers find its own.

    Args:
        indices: The n examples of an epoch, int64; one may be there several times.
        seed: Of the permutations, at least 0; None keeps the order of ``indices``.
    """

    def __init__(self, indices: NDArray[np.int64], seed: int | None) -> None:
        self._indices = indices
        self._seed = seed
        self._orders: dict[tuple[int, Dealing], NDArray[np.int64]] = {}

    def index(self, stream: ExampleStream, number: int) -> int:
        """Return the index of the example that ``number`` of ``stream`` stands for."""
        epoch, place = divmod(number, len(self._indices))
        key = epoch, stream.dealing(epoch)
        if key not in self._orders:
            # Two: where an epoch ends, numbers of both come in turn.
            self._orders = {**dict(list(self._orders.items())[-1:]), key: self._order(*key)}
        return int(self._indices[self._orders[key][place]])

    def _order(self, epoch: int, dealing: Dealing) -> NDArray[np.int64]:
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
    """Return ``order`` with examples moved to where the readers of their parts find them.

    Place p of an epoch is read by the readers of part (p + shift) mod ``n_parts``, and example
    number p of ``first`` belongs to part p mod ``n_parts``. What does not divide is nobody's: the
    last n mod ``n_parts`` examples of ``first`` go to those parts that have a place more in this
    epoch. Within a part examples keep the order that they have in ``order``.

    Args:
        order: The n examples of the epoch, different indices, int64, shape [n].
        first: The same in another order.
        n_parts: At most n.
        shift: At least 0.
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
