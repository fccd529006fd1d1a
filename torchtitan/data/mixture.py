"""Examples of several sources, of which one may come several times in an epoch, or in part."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.rows.errors import DataError
from torchtitan.data.rows.examples import InstructExamples
from torchtitan.data.rows.messages import Conversation
from torchtitan.data.split import ExampleSplit

T = TypeVar("T")
# Not a setting: runs that differ in their seeds are compared on the same examples.
_PART_SEED = 0
MOST_REPEATS = 1000


class ExampleMixture:
    """Sources one behind the other; an example's index counts through all of them.

    Args:
        sources: At least one.
        weights: How often each source comes in an epoch, above 0; 1 for all where empty.
    """

    def __init__(self, sources: Sequence[InstructExamples], weights: Sequence[float] = ()) -> None:
        self.sources = tuple(sources)
        self.weights = tuple(weights) or (1.0,) * len(sources)
        self._ends = list(accumulate(map(len, sources)))

    def __len__(self) -> int:
        """Count the examples, each once."""
        return self._ends[-1]

    def read(self, index: int, use: Callable[[Conversation], T]) -> T:
        """Return what ``use`` makes of an example; see :meth:`InstructExamples.read`."""
        source = bisect_right(self._ends, index)
        first = self._ends[source - 1] if source else 0
        return self.sources[source].read(index - first, use)

    def worth_a_check(self) -> Iterator[int]:
        """Yield the examples to look at before a run: all local ones, the first of hub data."""
        first = 0
        for source in self.sources:
            yield from range(first, first + (1 if source.is_remote else len(source)))
            first += len(source)

    def epoch(self, split: ExampleSplit) -> NDArray[np.int64]:
        """Return the examples of an epoch, int64, those of one source behind those of another.

        Of a source with weight w each example comes floor(w) times, and a part of them, drawn once
        and always the same, once more; so many that the source has w times its examples, rounded.
        Examples that are held out come once.

        Raises:
            ValueError: If nothing is left.
        """
        indices = split.indices(len(self))
        if split.held_out or not self.mixed_as:
            return indices
        found = []
        for number, (end, weight) in enumerate(zip(self._ends, self.weights, strict=True)):
            first = self._ends[number - 1] if number else 0
            own = indices[(indices >= first) & (indices < end)]
            n_more = round((weight - int(weight)) * len(own))
            order = np.random.default_rng([_PART_SEED, number]).permutation(own)
            found += [*[own] * int(weight), np.sort(order[:n_more])]
        examples = np.concatenate(found)
        if not len(examples):
            raise DataError(
                f"data.weights are {list(self.weights)}, with which no example is left; raise them"
            )
        return examples

    @property
    def mixed_as(self) -> list[Any] | None:
        """Examples and weight of each source; None where each example comes once in an epoch."""
        if set(self.weights) == {1.0}:
            return None
        return [
            [len(source), weight] for source, weight in zip(self.sources, self.weights, strict=True)
        ]
