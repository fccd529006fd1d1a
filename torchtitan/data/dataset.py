"""Sequences of instruction data for fine-tuning, in a stream resumable to the example.

Only answers are learned (see ``torchtitan.data.chat_template``). An example is encoded on its own
while training. A sequence of ``seq_len`` tokens is a single example and padding, or, packed, as
many examples as fit (see ``torchtitan.data.sequences``); either way no answer sees another example.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger

from torchtitan.data.resumable import Progress, ResumableDataset
from torchtitan.data.rows.errors import DataError
from torchtitan.data.sequences import (
    LENGTHS,
    PLAIN_TEMPLATE,
    POSITIONS,
    ROWS,
    WINDOW_EXAMPLES,
    EncodedExample,
    Sample,
    Template,
    encode,
    join_examples,
    pack,
    pad_id,
)
from torchtitan.data.sources import ALL_EXAMPLES, ExampleMixture, ExampleSplit


@dataclass
class _Progress(Progress):
    """Position of a reader, and the fate of its epoch's examples, the whole window's included."""

    seen: int = 0
    dropped: int = 0
    shortened: int = 0

    def count(self, examples: Sequence[EncodedExample]) -> None:
        self.seen += len(examples)
        self.shortened += sum(example.n_cut > 0 for example in examples)
        self.dropped += sum(not example.has_target for example in examples)


class InstructDataset(ResumableDataset):
    """Sequences of a data-parallel rank; order and resuming come from the base class.

    Examples without answer tokens within ``seq_len`` are dropped, counted, and reported at the end
        of the epoch. An endless stream goes on to the next example. A finite stream finds such
        examples first, by encoding all: dropped on the way, they would make ranks' parts unequal.
        Packed sequences are made of :data:`WINDOW_EXAMPLES`
    examples of a rank's part at a time. Ranks do not have equally many of them: packing is for
    endless streams.

    Yields ``({"input": int64 [T], "n_tokens": int64 [], "rows": int64 []}, labels int64 [T])``,
    where ``"rows"`` is the example's index in the data set; packed, the inputs have
    ``"positions"``, int64 [T], and ``"lengths"`` instead: see :func:`join_examples`.
    """

    _progress = _Progress
    _at: _Progress

    def __init__(
        self,
        examples: ExampleMixture,
        tokenizer: BaseTokenizer,
        seq_len: int,
        *,
        infinite: bool = True,
        section: str = "training",
        split: ExampleSplit = ALL_EXAMPLES,
        template: Template = PLAIN_TEMPLATE,
        packing: bool = False,
        **place: Any,
    ) -> None:
        epoch, window = examples.epoch(split), WINDOW_EXAMPLES if packing else 1
        super().__init__(
            len(examples), epoch, infinite=infinite, split=split, window=window, **place
        )
        self.names_rows = not packing
        self.examples, self._tokenizer, self._seq_len = examples, tokenizer, seq_len
        self.template = template
        self._seq_len_key = f"{section}.seq_len"
        if template is PLAIN_TEMPLATE and tokenizer.eos_id is None:
            logger.warning(
                "The tokenizer has no end token (eos_token in tokenizer_config.json); "
                "the model will not learn where an answer ends"
            )

    def encode(self, index: int) -> EncodedExample:
        """The tokens of the example at ``index`` of the data set."""
        how = (self.template, self._tokenizer, self._seq_len)
        return self.examples.read(index, lambda said: encode(said, *how))

    @cached_property
    def _usable(self) -> np.ndarray:
        if self.infinite:
            return self._indices
        fits = [self.encode(int(i)).has_target for i in self._indices]
        usable = self._indices[np.array(fits, dtype=bool)]
        self._report(_Progress(seen=len(fits), dropped=len(fits) - len(usable)), "the data set")
        return usable

    def _rest_of_window(self, window: Sequence[int]) -> Iterator[Sample]:
        indices = [self._index(number) for number in window]
        examples, sequences = self._dealt_window(indices)
        dropped = [i for i, one in zip(indices, examples, strict=True) if not one.has_target]
        if not self._at.in_window:
            self._at.count(examples)
        self._without_target.update(dropped)
        for number in range(self._at.in_window, len(sequences)):
            # Counted before a sequence is handed out, since a checkpoint is taken after that.
            self._at.in_window = number + 1
            if self._at.in_window == len(sequences):
                self._leave(window)
            together = sequences[number]
            inputs, labels = self.join([examples[place] for place in together])
            if self.names_rows:
                del inputs[POSITIONS], inputs[LENGTHS]
                inputs[ROWS] = torch.tensor(indices[together[0]])
            yield inputs, labels
        if not sequences:
            self._leave(window)

    def join(self, examples: Sequence[EncodedExample]) -> Sample:
        """Return a sequence of fitting examples; see :func:`join_examples`."""
        return join_examples(examples, self._seq_len, pad_id(self._tokenizer))

    def sequences(self) -> Iterator[list[int]]:
        """Yield the examples of each sequence, where a single reader packs the split, once."""
        at = _Progress()
        for first in range(0, len(self._indices), self._window):
            indices = self._indices[first : first + self._window].tolist()
            examples, sequences = self._dealt_window(indices)
            at.count(examples)
            yield from ([indices[place] for place in together] for together in sequences)
        self._report(at, "the data set", is_whole=at.seen > 0)

    def _dealt_window(self, indices: Sequence[int]) -> tuple[list[EncodedExample], list[list[int]]]:
        """Return the examples at ``indices``, and the positions of each sequence's examples."""
        examples = [self.encode(index) for index in indices]
        usable = [place for place, example in enumerate(examples) if example.has_target]
        if self.names_rows:
            return examples, [[place] for place in usable]
        sequences = pack([examples[place].n_tokens for place in usable], self._seq_len)
        return examples, [[usable[i] for i in together] for together in sequences]

    def _report_epoch(self) -> None:
        if self._at.epoch is not None:
            is_whole = self._at.seen >= self.examples_of_a_reader(self._reader()[1])
            place = f"epoch {self._at.epoch} of rank {self.dp_rank}"
            self._report(self._at, place, is_whole=is_whole)

    def _report(self, at: _Progress, place: str, *, is_whole: bool = True) -> None:
        limit = f"{self._seq_len_key} = {self._seq_len}"
        if at.dropped == at.seen and is_whole:
            raise self._all_dropped(place, at.seen)
        if at.dropped:
            logger.warning(
                f"{place}: {at.dropped} of {at.seen} examples dropped, because none of their "
                f"answer lies within {limit}; raise {self._seq_len_key} to keep them"
            )
        if at.shortened > at.dropped:
            logger.info(
                f"{place}: {at.shortened - at.dropped} of {at.seen} examples cut at {limit}"
            )

    def _all_dropped(self, place: str, n_examples: int) -> DataError:
        return DataError(
            f"{place}: none of {n_examples} examples has an answer token within "
            f"{self._seq_len_key} = {self._seq_len}; raise {self._seq_len_key}"
        )

    def require_targets(self) -> None:
        """Refuse data without any usable example; reads on to the first."""
        if not any(self.encode(int(index)).has_target for index in self._indices):
            raise self._all_dropped("the data set", len(self._indices))

    def _kept(self, indices: Mapping[int, int], handed_out: int) -> list[int]:
        numbers, (_, sequences) = list(indices), self._dealt_window(list(indices.values()))
        return [numbers[place] for part in sequences[handed_out:] for place in part]

    def _identity(self) -> dict[str, Any]:
        packed_as = None if self.names_rows else f"{self._seq_len} tokens, {self.template.name}"
        return super()._identity() | {"packing": packed_as, "weights": self.examples.mixed_as}

    def state_dict(self) -> dict[str, Any]:
        """Position of this reader, and its template."""
        return super().state_dict() | {"template": self.template.name}

    def change_since(self, state: Mapping[str, Any]) -> str | None:
        """Return a message where examples were written by another template; formerly "plain"."""
        saved, now = state.get("template"), self.template.name
        if now == (saved or PLAIN_TEMPLATE.name):
            return None
        then = "does not say, by default 'plain'" if saved is None else f"{saved!r}"
        return (
            f"From here on examples are written by the chat template {now!r}; before the "
            f"checkpoint: {then} (data.chat_template)"
        )


class PackedOnce(ResumableDataset):
    """Examples of a packed data set once, in sequences equal for any readers.

    Behind them come sequences of padding alone, for a multiple of ``multiple``: with readers times
    batch size all readers have equally many full batches. There are at most ``most`` sequences with
    examples.
    """

    names_rows = False

    def __init__(self, packed: InstructDataset, multiple: int, most: int | None = None) -> None:
        self._packed, self._sequences = packed, list(islice(packed.sequences(), most))
        self._sequences += [[]] * (-len(self._sequences) % multiple)
        n, place = len(self._sequences), (packed.dp_rank, packed.dp_world_size)
        super().__init__(n, np.arange(n), *place, infinite=False, split=packed.split)

    def _rest_of_window(self, window: Sequence[int]) -> Iterator[Sample]:
        self._leave(window)
        (number,) = window
        yield self._packed.join([self._packed.encode(i) for i in self._sequences[number]])
