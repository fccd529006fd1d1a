"""Batches of instruction data, from a loader that any number of ranks and workers can resume."""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger

from torchtitan.data.dataset import InstructDataset
from torchtitan.data.resumable import ResumableDataset
from torchtitan.data.rows.errors import DataError
from torchtitan.data.sources import ALL_EXAMPLES, DataSource, ExampleSplit, read_sources
from torchtitan.data.turns import PLAIN_TEMPLATE, Template

RANK_KEY = "dp_rank_"


class ResizableDataloader(ParallelAwareDataloader):
    """Upstream's loader, which saves what upstream's saves but can load what other ranks saved.

    Each rank saves its own state; upstream's loads no other. Here all are loaded: where there are
    as many readers of the same parts as before, each goes on from its own, otherwise all from what
    is left over.
    """

    dataset: ResumableDataset

    def upcoming(self, n_batches: int) -> list[list[int]]:
        """Return the rows of the batches that come next, while this loader is being iterated.

        They are indices in the data set, as ``"rows"`` of a batch; the loader stays where it is.

        Args:
            n_batches: How many, at least 0; there are fewer where the examples end, and none where
                rows have no names (packing) or workers alone know where they are.
        """
        if self.num_workers or not self.dataset.names_rows:
            return []
        size = self.batch_size
        assert size is not None  # batches are made here
        rows = self.dataset.upcoming(n_batches * size)
        batches = [rows[first : first + size] for first in range(0, len(rows), size)]
        return [batch for batch in batches if len(batch) == size or not self.drop_last]

    def state_to_load(self, keys: Collection[str]) -> dict[str, Any]:
        """Return what to load of a checkpoint that has ``keys``: the states of all ranks."""
        ranks = [key for key in keys if key.startswith(RANK_KEY)]
        return {**dict.fromkeys(ranks or [self._rank_id], b""), "world_size": 0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the states of all ranks.

        Raises:
            ValueError: If a rank's state is missing, or they belong to other data.
        """
        if not state_dict:  # nothing was read yet
            return
        dp_degree = state_dict["world_size"]
        for name in [key for key in state_dict if key.startswith(RANK_KEY)][:1]:
            self._tell_change(next(_dataset_states(_plain(state_dict[name]))))
        if dp_degree == self.dp_world_size and self._rank_id in state_dict:
            own = _plain(state_dict[self._rank_id])
            workers = list(_dataset_states(own))
            if len(workers) == max(1, self.num_workers) and self.dataset.continues(
                workers, dp_degree * len(workers)
            ):
                StatefulDataLoader.load_state_dict(self, own)
                return
        names = [f"{RANK_KEY}{rank}" for rank in range(dp_degree)]
        if missing := [name for name in names if name not in state_dict]:
            raise DataError(
                f"the checkpoint's data loader has world_size = {dp_degree}, but not "
                f"{', '.join(missing)}; to start the data anew, add 'dataloader' to "
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
        """Refuse, with a DataError, what a rank has saved of other data or in another order."""
        self.dataset.require_same(next(_dataset_states(_plain(saved))))

    def _tell_change(self, state: Mapping[str, Any]) -> None:
        if change := self.dataset.change_since(state):
            logger.warning(change)


class _PlainUnpickler(pickle.Unpickler):
    """Reads values that need no code: numbers, texts, lists, dicts."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(
            f"the checkpoint's data loader names {module}.{name}; its state must be plain values"
        )


def _plain(pickled: bytes) -> dict[str, Any]:
    state: dict[str, Any] = _PlainUnpickler(io.BytesIO(pickled)).load()
    return state


def _dataset_states(state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the state of a rank's data set as each of its workers has it, or it alone.

    They stand where torchdata's loader puts them.
    """
    if "_snapshot" not in state:
        yield state["dataset_state"]
        return
    if state["_steps_since_snapshot"]:
        raise DataError(
            "the checkpoint's data loader was not saved at every step; resume with as many "
            "data-parallel ranks, or, to start the data anew, add 'dataloader' to "
            "checkpoint.exclude_from_loading"
        )
    workers = state["_snapshot"]["_worker_snapshots"]
    for number in range(len(workers)):
        yield workers[f"worker_{number}"]["dataset_state"]


def build_instruct_dataloader(
    *,
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    sources: Sequence[DataSource],
    seq_len: int,
    batch_size: int,
    infinite: bool = True,
    shuffle_seed: int | None = None,
    section: str = "training",
    split: ExampleSplit = ALL_EXAMPLES,
    template: Template = PLAIN_TEMPLATE,
    packing: bool = False,
    keeps_parts: bool = False,
    **dataloader_kwargs: Any,
) -> ResizableDataloader:
    """Build the loader of instruction data.

    ``sources`` say where the examples are; ``batch_size`` counts sequences. Other arguments are
    those of :class:`InstructDataset`, or for ``StatefulDataLoader``: ``drop_last`` is True unless
    given, since a pipeline schedule cannot run a batch of another size.

    Returns:
        ResizableDataloader: Batches of ``({"input": [B, T], "n_tokens": [B], "rows": [B]},
            labels [B, T])``, with ``"positions": [B, T]`` instead of ``"rows"`` if packed.

    Raises:
        DataError: If the data gives no batch.
        FileNotFoundError: If a local path does not exist.
        DataExampleError: If an example is broken. Local examples are all checked here, hub examples
            when read.
    """
    examples = read_sources(sources)
    dataset = InstructDataset(
        examples=examples,
        tokenizer=tokenizer,
        seq_len=seq_len,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        infinite=infinite,
        shuffle_seed=shuffle_seed,
        section=section,
        split=split,
        template=template,
        packing=packing,
        keeps_parts=keeps_parts,
    )
    for index in examples.worth_a_check():
        dataset.sequences.check(index)  # better now than hours into a run
    dataloader_kwargs.setdefault("drop_last", True)
    workers = max(1, dataloader_kwargs.get("num_workers", 0))
    count = dataset.examples_of_a_reader(dp_world_size * workers)
    if infinite:
        dataset.require_targets()  # a finite one looks at all
    elif dataloader_kwargs["drop_last"]:
        require_a_batch(count, batch_size, section, split)
        if count % batch_size:
            logger.info(
                f"The last {count % batch_size} of a reader's {count} examples do not fill a batch "
                f"of {section}.local_batch_size = {batch_size} and are left out"
            )
    return ResizableDataloader(
        dataset,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        batch_size=batch_size,
        **dataloader_kwargs,
    )


def require_a_batch(count: int, batch_size: int, section: str, split: ExampleSplit) -> None:
    """Refuse a reader's part that is smaller than a batch.

    Raises:
        DataError: Naming the keys of ``section``.
    """
    if count >= batch_size:
        return
    more = "more data"
    if split.held_out:
        more = f"a larger data.validation_fraction (it is {split.validation_fraction})"
    raise DataError(
        f"{section}.local_batch_size is {batch_size}, but a reader has only {count} examples; "
        f"lower it, or use fewer ranks, fewer workers or {more}"
    )


Batch = tuple[dict[str, Tensor], Tensor]


class _Held(NamedTuple):
    """A batch that was looked at; None where there are no more. And the loader's state before."""

    state: dict[str, Any]
    batch: Batch | None


class Lookahead:
    """The batches of a loader; what it saves counts those that were handed out.

    Args:
        loader: Where batches come from.
    """

    def __init__(self, loader: ResizableDataloader) -> None:
        self._loader = loader
        self._batches: Iterator[Batch] = iter(())
        self._held: _Held | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Begin where the loader is; only one iterator is there at a time."""
        self._batches = iter(self._loader)
        return self

    def __next__(self) -> Batch:
        """Return the next batch.

        Raises:
            StopIteration: If there is none.
        """
        held, self._held = self._held, None
        if held is None:
            return next(self._batches)
        if held.batch is None:
            raise StopIteration
        return held.batch

    def peek(self) -> Batch | None:
        """Return the batch that comes next, which stays there; None if there is none."""
        if self._held is None:
            state = self._loader.state_dict()
            self._held = _Held(state, next(self._batches, None))
        return self._held.batch

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state before the batch that comes next."""
        return self._loader.state_dict() if self._held is None else self._held.state

    def state_to_load(self, keys: Collection[str]) -> dict[str, Any]:
        """Return what to load of a checkpoint that has ``keys`` of the loader."""
        return self._loader.state_to_load(keys)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what was saved; raises as the loader does."""
        self._loader.load_state_dict(state_dict)
