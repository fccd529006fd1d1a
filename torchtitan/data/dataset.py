"""Sequences of instruction data for fine-tuning, in a stream that is resumable to the example.

Only answers are learned (see ``torchtitan.data.turns``). An example is encoded on its own while
training. A sequence of ``seq_len`` tokens is one example and padding, or, packed, as many examples
as fit (see ``torchtitan.data.sequences``); either way no answer sees another example.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset, get_worker_info
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger

from torchtitan.data.mixture import ExampleMixture
from torchtitan.data.order import EpochOrder
from torchtitan.data.sequences import WINDOW_EXAMPLES, ExampleSequences, Sample
from torchtitan.data.split import ALL_EXAMPLES, ExampleSplit
from torchtitan.data.stream import Dealing, ExampleStream, ReaderPlace, remaining
from torchtitan.data.turns import PLAIN_TEMPLATE, Template


@dataclass
class _Progress:
    """How far a reader is.

    Attributes:
        taken: Examples of the windows behind it.
        in_window: Sequences handed out of the window that it is in.
        epoch: The epoch of the counts that follow, or None before the first example.
        seen: Examples of the epoch so far, those of the whole window included.
        dropped: Those of them without an answer token within ``seq_len``.
        shortened: Those of them that were cut.
    """

    taken: int = 0
    in_window: int = 0
    epoch: int | None = None
    seen: int = 0
    dropped: int = 0
    shortened: int = 0


class InstructDataset(IterableDataset, Stateful):
    """Sequences of one data-parallel rank, in an order that a checkpoint can resume.

    An epoch is a pass over all examples of the split, those of a source with a weight as often as
    that says (:meth:`ExampleMixture.epoch`), in this order or in a permutation drawn from
    ``(shuffle_seed, epoch)``, the same on all ranks. Epochs follow each other in one stream
    (:mod:`torchtitan.data.stream`), of which rank r of D takes every D-th example from the r-th on;
    of W loader workers, worker w counts as rank r W + w of D W. So the stream does not depend on
    who reads it, and any number of ranks can go on where others have stopped: see
    :meth:`remaining`.

    With ``keeps_parts`` each of several ranks, and each of its workers, has the same examples in
    every epoch, in another order, except for the n mod (D W) of them that do not divide
    (:mod:`torchtitan.data.order`). The first epoch is the same without. After a resume by other
    readers, or with the other setting, this begins with the next epoch.

    A finite stream (``infinite=False``) is one epoch. It is cut to equal parts, so that no rank
    runs dry before another: up to D - 1 (D W - 1) examples are left out.

    An example none of whose answer tokens fits into ``seq_len`` is dropped, counted, and reported
    at the end of the epoch. An endless stream goes on to the next example. A finite one finds these
    examples before it starts, by encoding all examples once: dropped on the way, they would make
    one rank's part shorter than another's.

    Iterating anew starts at the first example, unless ``load_state_dict`` or ``go_on`` was called
    since.

    Packed sequences are made of :data:`WINDOW_EXAMPLES` examples of a rank's part at a time, all of
    one epoch. Ranks do not have equally many of them: packing is for endless streams.

    Args:
        examples: The data set, one or several sources.
        tokenizer: See :func:`encode`.
        seq_len: T, at least 1.
        dp_rank: Data-parallel rank, in [0, dp_world_size).
        dp_world_size: Number of data-parallel ranks, D.
        infinite: Go on with the next epoch after the last example.
        shuffle_seed: Seed of the permutations, at least 0; None keeps the order.
        section: Config section that messages name.
        split: Which examples to read.
        template: Makes tokens of what an example says.
        packing: Put several examples into a sequence.
        keeps_parts: Whether each rank has the same examples in every epoch.

    Attributes:
        infinite: Whether examples never end.
        sequences: Makes them of examples.

    Yields:
        ``({"input": int64 [T], "n_tokens": int64 [], "rows": int64 []}, labels int64 [T])``, where
        ``"rows"`` is the example's index in the data set; packed, the inputs have ``"positions"``,
        int64 [T], instead of it: see :class:`PackedSequence`.

    Raises:
        ValueError: If an argument is out of range, there are fewer examples than ranks, or every
            example of an epoch is dropped.
        DataExampleError: If an example cannot be read, or the template refuses it.
    """

    def __init__(
        self,
        examples: ExampleMixture,
        tokenizer: BaseTokenizer,
        seq_len: int,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        infinite: bool = True,
        shuffle_seed: int | None = None,
        section: str = "training",
        split: ExampleSplit = ALL_EXAMPLES,
        template: Template = PLAIN_TEMPLATE,
        packing: bool = False,
        keeps_parts: bool = False,
    ) -> None:
        if seq_len < 1:
            raise ValueError(f"{section}.seq_len is {seq_len}; it must be at least 1")
        if not 0 <= dp_rank < dp_world_size:
            raise ValueError(f"dp_rank is {dp_rank}; it must lie in [0, {dp_world_size})")
        if shuffle_seed is not None and shuffle_seed < 0:
            raise ValueError(f"shuffle_seed is {shuffle_seed}; it must be at least 0, or None")
        if packing and not infinite:
            raise ValueError(
                "packing is True and infinite is False; packing is for endless streams"
            )
        self.sequences = ExampleSequences(examples, tokenizer, seq_len, template, packing)
        self._n_examples = len(examples)
        self._seq_len = seq_len
        self._dp_rank = dp_rank
        self._dp_world_size = dp_world_size
        self.infinite = infinite
        self._shuffle_seed = shuffle_seed
        self._seq_len_key = f"{section}.seq_len"
        self._split = split
        self._window = WINDOW_EXAMPLES if packing else 1
        self._indices = examples.epoch(split)
        self._keeps_parts = keeps_parts and dp_world_size > 1  # one rank has them all anyway
        self._without_target: set[int] = set()  # examples that were dropped before
        self._begin(ExampleStream())
        self._resumed = False
        if template is PLAIN_TEMPLATE and tokenizer.eos_id is None:
            logger.warning(
                "The tokenizer has no end token (eos_token in tokenizer_config.json); "
                "the model will not learn where an answer ends"
            )

    @property
    def n_examples_of_epoch(self) -> int:
        """How many examples of the split all ranks together read in an epoch, dropped ones too."""
        return len(self._indices)

    def _begin(self, stream: ExampleStream) -> None:
        """Be at the first example of ``stream``."""
        self._stream, self._at = stream, _Progress()

    def _reader(self) -> tuple[int, int]:
        """Return the number of this reader, and how many there are."""
        worker = get_worker_info()
        workers, worker_id = (1, 0) if worker is None else (worker.num_workers, worker.id)
        return self._dp_rank * workers + worker_id, self._dp_world_size * workers

    @cached_property
    def _usable(self) -> np.ndarray:
        """Indices of the examples of an epoch, int64, in the order of the split."""
        if self.infinite:
            return self._indices
        fits = [self.sequences.encode(int(i)).has_target for i in self._indices]
        usable = self._indices[np.array(fits, dtype=bool)]
        self._report(_Progress(seen=len(fits), dropped=len(fits) - len(usable)), "the data set")
        return usable

    def examples_of_a_reader(self, n_readers: int) -> int:
        """Return how many examples of an epoch each of ``n_readers`` gets at least.

        Raises:
            ValueError: If there are fewer examples than readers.
        """
        usable = len(self._usable)
        if usable < n_readers:
            raise ValueError(
                f"the data set has {usable} usable examples, fewer than the {n_readers} readers "
                "(data-parallel ranks times loader workers); use fewer ranks or more data"
            )
        return usable // n_readers

    @cached_property
    def _order(self) -> EpochOrder:
        return EpochOrder(self._usable, self._shuffle_seed)

    def _index(self, number: int) -> int:
        """Return which example of the data set a number of the stream stands for."""
        return self._order.index(self._stream, number)

    def _dealt(self, stream: ExampleStream, n_readers: int) -> ExampleStream:
        """Return the stream as so many readers take it."""
        if not (self._keeps_parts or stream.dealings):
            return stream
        return stream.in_parts(n_readers if self._keeps_parts else 1, len(self._usable))

    def __iter__(self) -> Iterator[Sample]:
        """Yield sequences, from the first or from where the loaded state was."""
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
                self._at = _Progress(self._at.taken, self._at.in_window, epoch)
            yield from self._rest_of_window(window)
        self._report_epoch()

    def _most(self, n_readers: int) -> float:
        """Return how many examples of the stream a reader takes at all."""
        self.examples_of_a_reader(n_readers)  # refuses too many readers
        left = len(self._stream.left) + len(self._usable) - self._stream.start
        return math.inf if self.infinite else left // n_readers

    def upcoming(self, n: int) -> list[int]:
        """Return the indices of the examples that this reader hands out next; it stays where it is.

        For a data set that is being iterated in this process, without packing. An example that will
        be dropped is among them if this reader has not come by it before.

        Args:
            n: How many; there are fewer where the examples end.
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
        """Return the numbers that a reader takes next: a window full, all of one epoch."""
        n_examples = len(self._usable)
        numbers = [stream.number(reader + (taken + i) * n_readers) for i in range(self._window)]
        return [number for number in numbers if number // n_examples == numbers[0] // n_examples]

    def _rest_of_window(self, window: Sequence[int]) -> Iterator[Sample]:
        """Yield what is left of a window, and leave it behind."""
        indices = [self._index(number) for number in window]
        examples = [self.sequences.encode(index) for index in indices]
        places = [place for place, example in enumerate(examples) if example.has_target]
        usable = [examples[place] for place in places]
        rows = [indices[place] for place in places]
        if not self._at.in_window:
            self._at.seen += len(examples)
            self._at.shortened += sum(example.n_cut > 0 for example in examples)
            self._at.dropped += len(examples) - len(usable)
        self._without_target.update(set(indices) - set(rows))
        sequences = self.sequences.dealt(usable)
        for number in range(self._at.in_window, len(sequences)):
            # Counted before a sequence is handed out, since a checkpoint is taken after that.
            self._at.in_window = number + 1
            if self._at.in_window == len(sequences):
                self._leave(window)
            together = sequences[number]
            yield self.sequences.sample([usable[i] for i in together], [rows[i] for i in together])
        if not sequences:
            self._leave(window)

    def _leave(self, window: Sequence[int]) -> None:
        self._at.taken += len(window)
        self._at.in_window = 0

    def _report_epoch(self) -> None:
        """Tell what became of the examples of the epoch that ends."""
        if self._at.epoch is not None:
            is_whole = self._at.seen >= self.examples_of_a_reader(self._reader()[1])
            place = f"epoch {self._at.epoch} of rank {self._dp_rank}"
            self._report(self._at, place, is_whole=is_whole)

    def _report(self, at: _Progress, place: str, *, is_whole: bool = True) -> None:
        limit = f"{self._seq_len_key} = {self._seq_len}"
        if at.dropped == at.seen and is_whole:
            raise ValueError(
                f"{place}: none of {at.seen} examples has an answer token within {limit}; raise "
                f"{self._seq_len_key}"
            )
        if at.dropped:
            logger.warning(
                f"{place}: {at.dropped} of {at.seen} examples dropped, because none of their "
                f"answer lies within {limit}; raise {self._seq_len_key} to keep them"
            )
        if at.shortened > at.dropped:
            logger.info(
                f"{place}: {at.shortened - at.dropped} of {at.seen} examples cut at {limit}"
            )

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a position to mean the same example."""
        return {
            "examples": self._n_examples,
            "shuffle_seed": self._shuffle_seed,
            "infinite": self.infinite,
            "validation_fraction": self._split.validation_fraction,
            "held_out": self._split.held_out,
            "packing": self.sequences.packed_as,
            "weights": self.sequences.examples.mixed_as,
        }

    def state_dict(self) -> dict[str, Any]:
        """Where this reader is; see :meth:`load_state_dict`."""
        n_readers = self._reader()[1]
        stream = self._dealt(self._stream, n_readers)
        return self._identity() | {
            "template": self.sequences.template.name,
            "readers": n_readers,
            "start": stream.start,
            "left": list(stream.left),
            "dealings": [list(dealing) for dealing in stream.dealings],
            **vars(self._at),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration go on from ``state_dict``.

        Raises:
            ValueError: If the state belongs to another data set or order, or cannot be gone on from
                by as many readers; then :meth:`remaining` tells what they have left.
        """
        n_readers = self._reader()[1]
        if not self.continues([state_dict], n_readers):
            raise ValueError(
                f"this is the state of one of other readers than these {n_readers}, or of other "
                "parts; remaining() tells what all of them together have left"
            )
        self._begin(_stream_of(state_dict))
        self._at = _Progress(**{name: state_dict[name] for name in vars(self._at)})
        self._resumed = True

    def template_change(self, state: Mapping[str, Any]) -> str | None:
        """Return what to tell where a state's examples were written by another template, or None.

        A state without a name is of a former version, whose default was the plain format.
        """
        saved, now = state.get("template"), self.sequences.template.name
        if now == (saved or PLAIN_TEMPLATE.name):
            return None
        then = "does not say, by default 'plain'" if saved is None else f"{saved!r}"
        return (
            f"From here on examples are written by the chat template {now!r}; before the "
            f"checkpoint: {then} (data.chat_template)"
        )

    def continues(self, states: Sequence[Mapping[str, Any]], n_readers: int) -> bool:
        """Return whether :meth:`load_state_dict` takes states of some of ``n_readers``.

        Raises:
            ValueError: If they belong to another data set or order.
        """
        for state in states:
            self._require_same(state)
        if any(state["readers"] != n_readers for state in states):
            return False
        streams = [_stream_of(state) for state in states]
        return all(self._dealt(stream, n_readers) == stream for stream in streams)

    def go_on(self, stream: ExampleStream) -> None:
        """Let the next iteration begin with the first example of ``stream``."""
        self._begin(stream)
        self._resumed = True

    def remaining(self, states: Sequence[Mapping[str, Any]]) -> ExampleStream:
        """Return the examples that readers have not handed out, for any number of others.

        Examples of a window that was half handed out are read once more, to see which it were.

        Args:
            states: What :meth:`state_dict` returned, of all readers in order.

        Raises:
            ValueError: If the states belong to another data set or order, or not together.
        """
        n_readers = len(states)
        for state in states:
            self._require_same(state)
        stream = _stream_of(states[0])
        if any(s["readers"] != n_readers or _stream_of(s) != stream for s in states):
            raise ValueError("these are not the states of all readers of one stream")
        places = [self._place(stream, state, r, n_readers) for r, state in enumerate(states)]
        return remaining(stream, places)

    def _place(
        self, stream: ExampleStream, state: Mapping[str, Any], reader: int, n_readers: int
    ) -> ReaderPlace:
        """Return how far a reader has come in the stream, and what it kept of its window."""
        if not state["in_window"]:
            return ReaderPlace(state["taken"])
        window = self._window_at(stream, state["taken"], reader, n_readers)
        indices = {number: self._order.index(stream, number) for number in window}
        examples = {number: self.sequences.encode(index) for number, index in indices.items()}
        usable = [number for number in window if examples[number].has_target]
        sequences = self.sequences.dealt([examples[number] for number in usable])
        kept = [usable[place] for part in sequences[state["in_window"] :] for place in part]
        return ReaderPlace(state["taken"] + len(window), kept)

    def _require_same(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if a state belongs to another data set or order."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ValueError(
                    f"the checkpoint's data loader has {name} = {state.get(name)!r}, this run has "
                    f"{value!r}; to start the data anew, add 'dataloader' to "
                    "checkpoint.exclude_from_loading"
                )


def _stream_of(state: Mapping[str, Any]) -> ExampleStream:
    """Return the stream that a reader's state was saved of; older ones have no dealings."""
    dealings = tuple(Dealing(*dealing) for dealing in state.get("dealings", ()))
    return ExampleStream(state["start"], tuple(state["left"]), dealings)
