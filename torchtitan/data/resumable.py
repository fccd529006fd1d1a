"""Data of a data-parallel rank, in an order resumable by any number of ranks and workers."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset, get_worker_info

from torchtitan.data.rows.errors import DataError
from torchtitan.data.sources import ALL_EXAMPLES, ExampleSplit
from torchtitan.data.stream import (
    EpochOrder,
    ExampleStream,
    ReaderPlace,
    ShardAssignment,
    remaining,
)


@dataclass
class Progress:
    """Position of a reader.

    ``taken`` counts examples of finished windows, ``in_window`` samples handed out of the present
    window; ``epoch`` is the last read example's, None before the first example.
    """

    taken: int = 0
    in_window: int = 0
    epoch: int | None = None


class ResumableDataset(IterableDataset, Stateful):
    """Samples of a data-parallel rank, in an order resumable from a checkpoint.

    An epoch is a pass over ``indices``, which may name an example several times, in their order or
    in a permutation drawn from ``(shuffle_seed, epoch)``, the same on all ranks. Epochs follow each
    other in a stream (:mod:`torchtitan.data.stream`); rank r of D takes every D-th example from the
    r-th on; of W loader workers, worker w counts as rank r W + w of D W. So the stream is
    independent of its readers, and any number of ranks can resume the work of others: see
    :meth:`remaining`.

    With ``fixed_shards`` ranks, and workers, have the same examples in every epoch, in another
    order, except for the remaining n mod (D W). The first epoch is the same without. After a resume
    by other readers, or with the other setting, the shards begin with the next epoch.

    A finite stream (``infinite=False``) is a single epoch, cut to equal parts, so that no rank runs
    dry before another: up to D - 1 (D W - 1) examples are left out.

    A subclass makes any number of samples of the examples of a ``window``, all of one epoch.
    """

    names_rows = True  # whether a sample is one example, so that its index names it
    _progress: type[Progress] = Progress

    def __init__(
        self,
        n_examples: int,
        indices: np.ndarray,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        infinite: bool = True,
        shuffle_seed: int | None = None,
        split: ExampleSplit = ALL_EXAMPLES,
        fixed_shards: bool = False,
        window: int = 1,
    ) -> None:
        self._n_examples = n_examples
        self.dp_rank = dp_rank
        self.dp_world_size = dp_world_size
        self.infinite = infinite
        self._shuffle_seed = shuffle_seed
        self.split = split
        self._window = window
        self._indices = indices
        self._fixed_shards = fixed_shards and dp_world_size > 1  # one rank has them all anyway
        self._without_target: set[int] = set()  # indices of examples that are known to be dropped
        self._begin(ExampleStream())
        self._resumed = False

    @abstractmethod
    def _rest_of_window(self, window: Sequence[int]) -> Iterator[Any]:
        """Yield the rest of a window, given its numbers, and :meth:`_leave` it behind.

        ``self._at.in_window`` counts a sample before handing it out, since a checkpoint comes
        later.
        """

    def _kept(self, indices: Mapping[int, int], handed_out: int) -> list[int]:
        """Return the numbers of a window not handed out yet, with their indices."""
        return []

    def _report_epoch(self) -> None:
        """Report an epoch's end."""

    @property
    def n_examples_of_epoch(self) -> int:
        """How many examples of the split all ranks together read in an epoch, dropped ones too."""
        return len(self._indices)

    @cached_property
    def _usable(self) -> np.ndarray:
        """Indices of the examples of an epoch, int64, in the order of the split."""
        return self._indices

    def require_targets(self) -> None:
        """Refuse data without any sample."""

    def _begin(self, stream: ExampleStream) -> None:
        """Be at the first example of ``stream``."""
        self._stream, self._at = stream, self._progress()

    def _reader(self) -> tuple[int, int]:
        """Return the number of this reader, and how many there are."""
        worker = get_worker_info()
        workers, worker_id = (1, 0) if worker is None else (worker.num_workers, worker.id)
        return self.dp_rank * workers + worker_id, self.dp_world_size * workers

    def examples_of_a_reader(self, n_readers: int) -> int:
        """Return the least number of examples per reader and epoch; DataError for none."""
        usable = len(self._usable)
        if usable < n_readers:
            raise DataError(
                f"the data set has {usable} usable examples, fewer than the {n_readers} readers "
                "(data-parallel ranks times loader workers); use fewer ranks or more data"
            )
        return usable // n_readers

    @cached_property
    def _order(self) -> EpochOrder:
        return EpochOrder(self._usable, self._shuffle_seed)

    def _index(self, number: int) -> int:
        """Return the data set's example for a number of the stream."""
        return self._order.index(self._stream, number)

    def _dealt(self, stream: ExampleStream, n_readers: int) -> ExampleStream:
        """Return the stream dealt to so many readers."""
        if not (self._fixed_shards or stream.dealings):
            return stream
        return stream.in_parts(n_readers if self._fixed_shards else 1, len(self._usable))

    def __iter__(self) -> Iterator[Any]:
        """Yield samples, from the first or from where the loaded state was."""
        if not self._resumed:
            self._begin(ExampleStream())
        self._resumed = False
        readers = self._reader()
        self._stream = self._dealt(self._stream, readers[1])
        most = self._most(readers[1])
        while self._at.taken < most:
            window = self._window_at(self._stream, self._at.taken, *readers)
            epoch = window[0] // len(self._usable)
            if epoch != self._at.epoch:
                self._report_epoch()
                self._at = self._progress(self._at.taken, self._at.in_window, epoch)
            yield from self._rest_of_window(window)
        self._report_epoch()

    def _most(self, n_readers: int) -> float:
        """Return how many examples of the stream a reader takes at all."""
        self.examples_of_a_reader(n_readers)  # refuses too many readers
        left = len(self._stream.left) + len(self._usable) - self._stream.start
        return math.inf if self.infinite else left // n_readers

    def upcoming(self, n: int) -> list[int]:
        """Return the indices of this reader's next examples, without moving.

        For a data set iterated in this process, with named rows. Fewer than ``n`` at the end of the
        examples. Examples to be dropped are among them until this reader has met them.
        """
        readers = self._reader()
        taken, most = self._at.taken, self._most(readers[1])
        found: list[int] = []
        while len(found) < n and taken < most:
            (number,) = self._window_at(self._stream, taken, *readers)
            index = self._index(number)
            if index not in self._without_target:
                found.append(index)
            taken += 1
        return found

    def _window_at(
        self, stream: ExampleStream, taken: int, reader: int, n_readers: int
    ) -> list[int]:
        """Return a reader's next numbers: a full window, all of the same epoch."""
        n_examples = len(self._usable)
        numbers = [stream.number(reader + (taken + i) * n_readers) for i in range(self._window)]
        return [number for number in numbers if number // n_examples == numbers[0] // n_examples]

    def _leave(self, window: Sequence[int]) -> None:
        self._at.taken += len(window)
        self._at.in_window = 0

    def _identity(self) -> dict[str, Any]:
        """Identity of a position's example."""
        return {
            "examples": self._n_examples,
            "shuffle_seed": self._shuffle_seed,
            "infinite": self.infinite,
            "validation_fraction": self.split.validation_fraction,
            "held_out": self.split.held_out,
        }

    def state_dict(self) -> dict[str, Any]:
        """Where this reader is; see :meth:`load_state_dict`."""
        n_readers = self._reader()[1]
        stream = self._dealt(self._stream, n_readers)
        return self._identity() | {
            "readers": n_readers,
            "start": stream.start,
            "left": list(stream.left),
            "dealings": [list(dealing) for dealing in stream.dealings],
            **vars(self._at),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration resume a state that :meth:`continues`; or ValueError."""
        n_readers = self._reader()[1]
        if not self.continues([state_dict], n_readers):
            raise ValueError(
                f"this is the state of one of other readers than these {n_readers}, or of other "
                "parts; remaining() tells what all of them together have left"
            )
        self._begin(_stream_of(state_dict))
        self._at = self._progress(**{name: state_dict[name] for name in vars(self._at)})
        self._resumed = True

    def change_since(self, state: Mapping[str, Any]) -> str | None:
        """Return a message on samples made otherwise than before a state; or None."""
        return None

    def continues(self, states: Sequence[Mapping[str, Any]], n_readers: int) -> bool:
        """Return whether :meth:`load_state_dict` takes these; DataError if of other data."""
        for state in states:
            self.require_same(state)
        if any(state["readers"] != n_readers for state in states):
            return False
        streams = [_stream_of(state) for state in states]
        return all(self._dealt(stream, n_readers) == stream for stream in streams)

    def go_on(self, stream: ExampleStream) -> None:
        """Let the next iteration begin with the first example of ``stream``."""
        self._begin(stream)
        self._resumed = True

    def remaining(self, states: Sequence[Mapping[str, Any]]) -> ExampleStream:
        """Return the examples not handed out by readers, for any number of others.

        Examples of a window handed out in part are read once more, to identify the rest.
        ``states`` are of all readers in order; DataError or ValueError if they do not belong
        together.
        """
        n_readers = len(states)
        for state in states:
            self.require_same(state)
        stream = _stream_of(states[0])
        if any(s["readers"] != n_readers or _stream_of(s) != stream for s in states):
            raise ValueError("these are not the states of all readers of one stream")
        places = [self._place(stream, state, r, n_readers) for r, state in enumerate(states)]
        return remaining(stream, places)

    def _place(
        self, stream: ExampleStream, state: Mapping[str, Any], reader: int, n_readers: int
    ) -> ReaderPlace:
        """Return a reader's position in the stream, and the rest of its window."""
        if not state["in_window"]:
            return ReaderPlace(state["taken"])
        window = self._window_at(stream, state["taken"], reader, n_readers)
        indices = {number: self._order.index(stream, number) for number in window}
        kept = self._kept(indices, state["in_window"])
        return ReaderPlace(state["taken"] + len(window), kept)

    def require_same(self, state: Mapping[str, Any]) -> None:
        """Raise DataError if a state belongs to another data set or order."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise DataError(
                    f"the checkpoint's data loader has {name} = {state.get(name)!r}, this run has "
                    f"{value!r}; give the run the data it had (training.dataset_path, data), or, "
                    "to start the data again, add 'dataloader' to checkpoint.exclude_from_loading"
                )


def _stream_of(state: Mapping[str, Any]) -> ExampleStream:
    """Return the stream of a reader's state; older streams have no dealings."""
    dealings = tuple(ShardAssignment(*dealing) for dealing in state.get("dealings", ()))
    return ExampleStream(state["start"], tuple(state["left"]), dealings)
