"""The endless stream of a data set's examples, and what is left of it when its readers change."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class ExampleStream:
    """Numbers of the examples that nobody had read when the readers began, ascending.

    Number g stands for the example at place g mod n of epoch g div n, in the order of that epoch; n
    is the number of examples. So a number means the same example whoever reads it. Of R readers, r
    takes every R-th number from the r-th on.

    Attributes:
        start: All numbers from here on are in the stream.
        left: Those before ``start`` that are.
    """

    start: int = 0
    left: tuple[int, ...] = ()

    def number(self, place: int) -> int:
        """Return the number at ``place`` of the stream, from 0."""
        n_left = len(self.left)
        return self.left[place] if place < n_left else self.start + place - n_left


class ReaderPlace(NamedTuple):
    """How far a reader has come.

    Attributes:
        taken: How many of its numbers it will not come back to.
        kept: Those of them that it has not handed out.
    """

    taken: int
    kept: Collection[int] = ()


def remaining(stream: ExampleStream, readers: Sequence[ReaderPlace]) -> ExampleStream:
    """Return what all readers together have not handed out, for any number of others."""
    n = len(readers)
    firsts = [r + n * reader.taken for r, reader in enumerate(readers)]
    end = max(*firsts, len(stream.left))
    unread = {stream.number(place) for first in firsts for place in range(first, end, n)}
    for reader in readers:
        unread.update(reader.kept)
    start, left = stream.number(end), sorted(unread)
    while left and left[-1] == start - 1:
        start = left.pop()
    return ExampleStream(start, tuple(left))
