"""Batches of a data set, from a loader resumable by any number of ranks and workers."""

import io
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.tools.logging import logger

from torchtitan.data.dataset import InstructDataset
from torchtitan.data.resumable import ResumableDataset
from torchtitan.data.rows.errors import DataError
from torchtitan.data.sequences import Batch, as_batch
from torchtitan.data.sources import DataSource, read_sources
from torchtitan.settings.job_config import Validation

RANK_KEY = "dp_rank_"


class ResizableDataloader(ParallelAwareDataloader):
    """Upstream's loader, able to load the states of other ranks.

    Ranks save their own state; upstream's loads no other. Here all are loaded: with the same number
    of readers of the same parts, readers resume their own state, otherwise all share the rest.
    """

    dataset: ResumableDataset

    @property
    def n_readers(self) -> int:
        """How many processes read: workers where there are some, of all ranks."""
        return self.dp_world_size * max(1, self.num_workers)

    def upcoming(self, n_batches: int) -> list[list[int]]:
        """Return the rows of the next batches; none if packed, or with workers."""
        if self.num_workers or not self.dataset.names_rows:
            return []
        size = self.batch_size
        assert size is not None  # batches are made here
        rows = self.dataset.upcoming(n_batches * size)
        batches = [rows[first : first + size] for first in range(0, len(rows), size)]
        return [batch for batch in batches if len(batch) == size]

    def state_to_load(self, keys: Collection[str]) -> dict[str, Any]:
        """Return the states of all ranks to load from a checkpoint with ``keys``."""
        ranks = [key for key in keys if key.startswith(RANK_KEY)]
        return {**dict.fromkeys(ranks or [self._rank_id], b""), "world_size": 0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from the states of all ranks; ValueError for missing states or other data."""
        if not state_dict:  # nothing was read yet
            return
        dp_degree = state_dict["world_size"]
        for name in [key for key in state_dict if key.startswith(RANK_KEY)][:1]:
            if change := self.dataset.change_since(next(_dataset_states(_plain(state_dict[name])))):
                logger.warning(change)
        if dp_degree == self.dp_world_size and self._rank_id in state_dict:
            own = _plain(state_dict[self._rank_id])
            workers = list(_dataset_states(own))
            if len(workers) == max(1, self.num_workers) and self.dataset.continues(
                workers, dp_degree * len(workers)
            ):
                if ("_snapshot" in own) == (self.num_workers > 0):
                    StatefulDataLoader.load_state_dict(self, own)
                else:  # one worker reads what this process would
                    self.dataset.load_state_dict(workers[0])
                return
        names = [f"{RANK_KEY}{rank}" for rank in range(dp_degree)]
        if missing := [name for name in names if name not in state_dict]:
            raise DataError(
                f"the checkpoint's data loader has world_size = {dp_degree}, but not "
                f"{', '.join(missing)}; to start the data again, add 'dataloader' to "
                "checkpoint.exclude_from_loading"
            )
        readers = [state for name in names for state in _dataset_states(_plain(state_dict[name]))]
        self.dataset.go_on(self.dataset.remaining(readers))
        logger.info(
            "The data goes on with %d data-parallel ranks where %d have stopped, from the first "
            "example that none of them has read",
            self.dp_world_size,
            dp_degree,
        )

    def require_same(self, saved: bytes) -> None:
        """Refuse, with a DataError, a rank's state of other data or another order."""
        self.dataset.require_same(next(_dataset_states(_plain(saved))))


class _PlainUnpickler(pickle.Unpickler):
    """Reads values without code: numbers, texts, lists, dicts."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(
            f"the checkpoint's data loader names {module}.{name}; its state must be plain values"
        )


def _plain(pickled: bytes) -> dict[str, Any]:
    state: dict[str, Any] = _PlainUnpickler(io.BytesIO(pickled)).load()
    return state


def _dataset_states(state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the states of a rank's data set, or of its workers', from torchdata's places."""
    if "_snapshot" not in state:
        yield state["dataset_state"]
        return
    if state["_steps_since_snapshot"]:
        raise DataError(
            "the checkpoint's data loader was not saved at every step; resume with as many "
            "data-parallel ranks, or, to start the data again, add 'dataloader' to "
            "checkpoint.exclude_from_loading"
        )
    workers = state["_snapshot"]["_worker_snapshots"]
    for number in range(len(workers)):
        yield workers[f"worker_{number}"]["dataset_state"]


def read_dataset(sources: Sequence[DataSource], **of_dataset: Any) -> InstructDataset:
    """Return the examples of all sources, the local ones checked; hub examples are when read."""
    examples = read_sources(sources)
    dataset = InstructDataset(examples, **of_dataset)
    for index in examples.worth_a_check():
        examples.read(index, dataset.template.mark)  # better now than hours into a run
    return dataset


def loader_of(dataset: ResumableDataset, batch_size: int, **loading: Any) -> ResizableDataloader:
    """Return the loader of a data set, whose batches are full: a schedule can run no others.

    ``loading`` goes to torchdata's loader.
    """
    place = {"dp_rank": dataset.dp_rank, "dp_world_size": dataset.dp_world_size}
    how = {"batch_size": batch_size, "drop_last": True, "collate_fn": as_batch, **loading}
    built = ResizableDataloader(dataset, **place, **how)
    dataset.examples_of_a_reader(built.n_readers)
    dataset.require_targets()
    return built


def validation_loader(dataset: ResumableDataset, validation: Validation) -> ResizableDataloader:
    """Return the loader of validation data, at least a batch per reader."""
    size = validation.local_batch_size
    # A loader draws a seed whenever it is iterated: not from the generator that training uses.
    generator = torch.Generator()
    built = loader_of(dataset, size, generator=generator, **vars(validation.dataloader))
    n, count = map(dataset.examples_of_a_reader, (1, built.n_readers))
    if count < size:
        more = "more data"
        if dataset.split.held_out:
            more = f"a larger data.validation_fraction (it is {dataset.split.validation_fraction})"
        raise DataError(
            f"validation.local_batch_size is {size}, but a reader has only {count} examples; "
            f"lower it, or use fewer ranks, fewer workers or {more}"
        )
    left = n - count // size * size * built.n_readers
    if left and not dataset.infinite:
        logger.info(
            f"{left} of {n} examples do not fill a batch of validation.local_batch_size = {size} "
            "on every reader and are left out"
        )
    rows = "examples" if dataset.names_rows else "packed sequences"
    logger.info(f"Validation reads {count} {rows} for each reader")
    return built


class Lookahead:
    """The batches of a loader; its state counts batches handed out."""

    def __init__(self, loader: ResizableDataloader) -> None:
        self._loader, self.dataset = loader, loader.dataset
        self._batches: Iterator[Batch] = iter(())
        # The loader's state before a batch that was looked at, None where there are no more.
        self._held: tuple[dict[str, Any], Batch | None] | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Begin at the loader's position; a single iterator at a time."""
        self._batches = iter(self._loader)
        return self

    def __next__(self) -> Batch:
        """Return the next batch."""
        held, self._held = self._held, None
        if held is None:
            return next(self._batches)
        if held[1] is None:
            raise StopIteration
        return held[1]

    def peek(self) -> Batch | None:
        """Return the next batch without taking it; None at the end."""
        if self._held is None:
            self._held = self._loader.state_dict(), next(self._batches, None)
        return self._held[1]

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state before the next batch."""
        return self._loader.state_dict() if self._held is None else self._held[0]

    def state_to_load(self, keys: Collection[str]) -> dict[str, Any]:
        """Return the states to load from a checkpoint with ``keys`` of the loader."""
        return self._loader.state_to_load(keys)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a saved state; raises as the loader does."""
        self._loader.load_state_dict(state_dict)
