"""Which files, folders and hub data sets a configuration reads examples from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchtitan.data.mixture import ExampleMixture
from torchtitan.data.rows.examples import WHOLE, Columns, HubPart, read_examples
from torchtitan.data.rows.kinds import ROW_KINDS, is_instruct_dataset
from torchtitan.freezing.config import JobConfig


@dataclass(frozen=True)
class DataSource:
    """Where examples are, and what they are.

    Attributes:
        kind: A kind of rows, or "auto".
        path: A file, a folder or a hub name.
        weight: How often it comes in an epoch.
        part: What to read of a hub data set.
        columns: Fields and their columns, where they are called otherwise.
        key: Config key that holds ``path``.
    """

    kind: str
    path: str
    weight: float = 1.0
    part: HubPart = WHOLE
    columns: Columns = ()
    key: str = "training.dataset_path"

    @property
    def place(self) -> str:
        """The path, the same for all its spellings."""
        local = os.path.expanduser(self.path)
        return os.path.realpath(local) if os.path.exists(local) else self.path


def read_sources(sources: Sequence[DataSource]) -> ExampleMixture:
    """Read all sources; raises as :func:`read_examples`."""
    examples = [
        read_examples(s.path, s.kind, columns=s.columns, part=s.part, key=s.key) for s in sources
    ]
    return ExampleMixture(examples, [source.weight for source in sources])


def training_sources(config: JobConfig) -> tuple[DataSource, ...]:
    """Return what training reads; nothing for text.

    Raises:
        ValueError: If no place is named, or keys of ``[data]`` are not for as many places.
    """
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
    columns = tuple((field, column) for field, column in vars(data.columns).items() if column)
    key = "data.paths" if data.paths else "training.dataset_path"
    return tuple(
        DataSource(kind, path, 1.0 if weight == "" else float(weight), HubPart(*part), columns, key)
        for path, weight, part in zip(paths, weights, zip(*parts, strict=True), strict=True)
    )


def validation_sources(config: JobConfig) -> tuple[DataSource, ...]:
    """Return what validation reads, each example once; nothing for text.

    Without a path of its own it reads what training reads, if that has the same data set. A path
    that training reads is read in the same way, any other one as a whole.

    Raises:
        ValueError: As for training.
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
    columns = tuple((field, name) for field, name in vars(config.data.columns).items() if name)
    own = DataSource(kind, named, columns=columns, key="validation.dataset_path")
    same = [source.part for source in trained if source.place == own.place]
    return (replace(own, part=same[0]) if same else own,)


def reads_training_data(config: JobConfig) -> bool:
    """Return whether training and validation read the same instruction data.

    Paths may be spelled in several ways; a missing one means the default of its data set.
    """
    trained, read = training_sources(config), validation_sources(config)
    return bool(read) and [(s.kind, s.place, s.part) for s in trained] == [
        (s.kind, s.place, s.part) for s in read
    ]


def default_path(kind: str) -> str | None:
    """Return the hub data set of a kind of rows; None if it has none."""
    spec = ROW_KINDS.get(kind)
    return None if spec is None else spec.default_path


def _no_place(section: str, kind: str, or_paths: str) -> str:
    return (
        f"{section}.dataset is {kind!r}, which has no data of its own; set {section}.dataset_path"
        f"{or_paths} to a file, a folder or a hub name"
    )


def _for_each(key: str, value: str | Sequence[str | float], n_places: int) -> list[str | float]:
    """Return a key's value for each place; one text stands for all."""
    if isinstance(value, str) or not value:
        return [value or ""] * n_places
    if len(value) != n_places:
        raise ValueError(
            f"{key} is {list(value)}; it must have a value for each of {n_places} places "
            "(data.paths, or training.dataset_path)"
        )
    return list(value)
