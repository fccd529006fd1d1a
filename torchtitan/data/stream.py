"""The endless stream of a data set's examples, and what is left of it when its readers change."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class Dealing(NamedTuple):
    """Who gets an example in every epoch: number g is one of part (g + shift) mod n_parts.

    See :mod:`torchtitan.data.order`; with one part, who gets it is left to chance.

    Attributes:
        first_epoch: From which epoch on.
        n_parts: Number of parts.
        shift: In [0, n_parts).
    """

    first_epoch: int = 0
    n_parts: int = 1
    shift: int = 0


@dataclass(frozen=True)
class ExampleStream:
    """Numbers of the examples that nobody had read when the readers began, ascending.

    Number g stands for the example at place g mod n of epoch g div n, in the order of that epoch; n
    is the number of examples. So a number means the same example whoever reads it. Of R readers, r
    takes every R-th number from the r-th on.

    Attributes:
        start: All numbers from here on are in the stream.
        left: Those before ``start`` that are.
        dealings: How epochs are dealt, by ascending first epoch; those before the first of these
            have one part.
    """

    start: int = 0
    left: tuple[int, ...] = ()
    dealings: tuple[Dealing, ...] = ()

    def number(self, place: int) -> int:
        """Return the number at ``place`` of the stream, from 0."""
        n_left = len(self.left)
        return self.left[place] if place < n_left else self.start + place - n_left

    def dealing(self, epoch: int) -> Dealing:
        """Return how an epoch is dealt."""
        there = (dealing for dealing in reversed(self.dealings) if dealing.first_epoch <= epoch)
        return next(there, Dealing())

    def in_parts(self, n_parts: int, n_examples: int) -> ExampleStream:
        """Return the stream with a part for each of as many readers, one for 1.

        Epochs of which something was read before the readers began stay as they are.

        Args:
            n_parts: The number of readers, or 1.
            n_examples: Of an epoch.
        """
        shift = (len(self.left) - self.start) % n_parts
        wanted = Dealing(-(-self.start // n_examples), n_parts, shift)
        before = tuple(d for d in self.dealings if d.first_epoch < wanted.first_epoch)
        last = before[-1] if before else Dealing()
        is_same = (last.n_parts, last.shift) == (n_parts, shift)
        return replace(self, dealings=before if is_same else (*before, wanted))


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
    return replace(stream, start=start, left=tuple(left))
