"""Files, folders and hub data sets of a configuration's examples."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from torchtitan.data.rows.errors import DataError
from torchtitan.data.rows.examples import WHOLE, Columns, HubPart, InstructExamples, read_examples
from torchtitan.data.rows.kinds import ROW_KINDS, is_instruct_dataset
from torchtitan.data.rows.messages import Conversation
from torchtitan.settings import JobConfig


@dataclass(frozen=True)
class DataSource:
    """Place and kind of examples; ``weight`` is their number of times in an epoch."""

    kind: str
    path: str
    weight: float = 1.0
    part: HubPart = WHOLE
    columns: Columns = ()
    key: str = "training.dataset_path"

    @property
    def place(self) -> str:
        """The path, the same for all its spellings."""
        return os.path.realpath(self.path) if os.path.exists(self.path) else self.path


def read_sources(sources: Sequence[DataSource]) -> ExampleMixture:
    """Read all sources; raises as :func:`read_examples`."""
    examples = [
        read_examples(s.path, s.kind, columns=s.columns, part=s.part, key=s.key) for s in sources
    ]
    return ExampleMixture(examples, [source.weight for source in sources])


def training_sources(config: JobConfig) -> tuple[DataSource, ...]:
    """Return the sources of training, empty for text; ValueError for contradicting keys."""
    data, training = config.data, config.training
    kind = training.dataset.lower()
    if not is_instruct_dataset(kind):
        return ()
    named = training.dataset_path or default_path(kind)
    paths = data.paths or ([named] if named else [])
    if not paths:
        raise ValueError(_no_place("training", kind, " or data.paths"))
    keys = ("weights", "subset", "split", "revision")
    weights, *parts = (_for_each(f"data.{key}", getattr(data, key), len(paths)) for key in keys)
    columns = _named_columns(config)
    key = "data.paths" if data.paths else "training.dataset_path"
    return tuple(
        DataSource(kind, path, 1.0 if weight == "" else float(weight), HubPart(*part), columns, key)
        for path, weight, part in zip(paths, weights, zip(*parts, strict=True), strict=True)
    )


def validation_sources(config: JobConfig) -> tuple[DataSource, ...]:
    """Return the sources of validation, examples once each; empty for text.

    Without a path of its own validation reads training's sources, if the data set is the same. A
    path of training is read in the same way, any other path as a whole. Raises as for training.
    """
    validation, kind = config.validation, config.validation.dataset.lower()
    if not is_instruct_dataset(kind):
        return ()
    trained = training_sources(config)
    path = validation.dataset_path
    if path is None and kind == config.training.dataset.lower():
        return tuple(replace(source, weight=1.0) for source in trained)
    named = path or default_path(kind)
    if not named:
        raise ValueError(_no_place("validation", kind, ""))
    columns = _named_columns(config)
    own = DataSource(kind, named, columns=columns, key="validation.dataset_path")
    same = [source.part for source in trained if source.place == own.place]
    return (replace(own, part=same[0]) if same else own,)


def _named_columns(config: JobConfig) -> Columns:
    return tuple((field, column) for field, column in vars(config.data.columns).items() if column)


def reads_training_data(config: JobConfig) -> bool:
    """Return whether training and validation read the same instruction data, by any spelling."""
    trained, read = (
        [(source.kind, source.place, source.part) for source in sources(config)]
        for sources in (training_sources, validation_sources)
    )
    return bool(read) and trained == read


def default_path(kind: str) -> str | None:
    """Return the hub data set of a kind of rows; None without."""
    spec = ROW_KINDS.get(kind)
    return None if spec is None else spec.default_path


def _no_place(section: str, kind: str, or_paths: str) -> str:
    return (
        f"{section}.dataset is {kind!r}, which has no data of its own; set {section}.dataset_path"
        f"{or_paths} to a file, a folder or a hub name"
    )


def _for_each(key: str, value: str | Sequence[str | float], n_places: int) -> list[str | float]:
    """Return a key's value for all paths; a single text stands for all."""
    if isinstance(value, str) or not value:
        return [str(value or "")] * n_places
    if len(value) != n_places:
        raise ValueError(
            f"{key} is {list(value)}; it must have a value for each of {n_places} places "
            "(data.paths, or training.dataset_path)"
        )
    return list(value)


T = TypeVar("T")
# Not a setting: runs that differ in their seeds are compared on the same examples.
_PART_SEED = 0
MOST_REPEATS = 1000


class ExampleMixture:
    """Sources one behind the other, numbered through; an epoch repeats examples by weight."""

    def __init__(self, sources: Sequence[InstructExamples], weights: Sequence[float] = ()) -> None:
        self.sources = tuple(sources)
        self.weights = tuple(weights) or (1.0,) * len(sources)
        self._starts = [0, *accumulate(map(len, sources))]

    def __len__(self) -> int:
        """Count the examples, once each."""
        return self._starts[-1]

    def read(self, index: int, use: Callable[[Conversation], T]) -> T:
        """Return the result of ``use`` on an example; see :meth:`InstructExamples.read`."""
        source = bisect_right(self._starts, index) - 1
        return self.sources[source].read(index - self._starts[source], use)

    def worth_a_check(self) -> Iterator[int]:
        """Yield the examples to look at before a run: all local ones, the first of hub data."""
        for first, source in zip(self._starts, self.sources, strict=False):
            yield from range(first, first + (1 if source.is_remote else len(source)))

    def epoch(self, split: ExampleSplit) -> NDArray[np.int64]:
        """Return the examples of an epoch, int64, source after source.

        Examples of a source with weight w come floor(w) times, and a part of them, drawn once for
            all, once more, for w times the examples in total, rounded. Held-out examples come once.
        """
        indices = split.indices(len(self))
        if split.held_out or not self.mixed_as:
            return indices
        found = []
        for number, weight in enumerate(self.weights):
            first, end = self._starts[number : number + 2]
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
        """Examples and weight of all sources; None where all examples come once in an epoch."""
        if set(self.weights) == {1.0}:
            return None
        return [
            [len(source), weight] for source, weight in zip(self.sources, self.weights, strict=True)
        ]


# Not a setting: runs that differ in their seeds are compared on the same examples.
_SPLIT_SEED = 0


@dataclass(frozen=True)
class ExampleSplit:
    """A part of a data set: to train on, or ``held_out``.

    Held-out examples depend on the number of examples and the fraction, in [0, 1), alone. A smaller
    fraction's are among a larger fraction's.
    """

    validation_fraction: float = 0.0
    held_out: bool = False

    def indices(self, n_examples: int) -> NDArray[np.int64]:
        """Return the examples of this part, int64.

        Training examples come in the order of the data set, held-out examples in random order, so
        that their beginning is a fair sample. DataError if none is left to train on.
        """
        n_held_out = round(self.validation_fraction * n_examples)
        if not n_held_out:
            return np.arange(0 if self.held_out else n_examples, dtype=np.int64)
        if n_held_out == n_examples:
            raise DataError(
                f"data.validation_fraction is {self.validation_fraction}, which holds out all of "
                f"{n_examples} examples; lower it, or use more data"
            )
        order = np.random.default_rng(_SPLIT_SEED).permutation(n_examples)
        return order[:n_held_out] if self.held_out else np.sort(order[n_held_out:])


ALL_EXAMPLES = ExampleSplit()
