"""Sequences of instruction data: of one example or, packed, of several; and as text for people.

Examples are packed in windows of consecutive examples of a stream. What a window becomes depends on
its examples alone, so a stream is resumed by the number of its window and of the sequence in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torchtitan.components.tokenizer import BaseTokenizer

from torchtitan.data.rows.messages import Conversation
from torchtitan.data.sources import ExampleMixture
from torchtitan.data.turns import IGNORE_INDEX, EncodedExample, Template, encode, pad_id

Sample = tuple[dict[str, Tensor], Tensor]
# The loader's name, and the model's, for the place of each token in its example.
POSITIONS = "positions"
# The loader's name for which example of the data set a sequence is.
ROWS = "rows"

# Examples packed together: enough that what stays empty in a window's last sequences is little, and
# few enough that encoding them is no pause.
WINDOW_EXAMPLES = 128
# The margin of a sequence as text.
READ, LEARNED = "        | ", "learned | "


@dataclass(frozen=True)
class ExampleSequences:
    """Makes sequences of examples; arguments are those of ``InstructDataset``."""

    examples: ExampleMixture
    tokenizer: BaseTokenizer
    seq_len: int
    template: Template
    packing: bool

    def encode(self, index: int) -> EncodedExample:
        """The tokens of the example at ``index`` of the data set."""

        def encoded(said: Conversation) -> EncodedExample:
            return encode(said, self.template, self.tokenizer, self.seq_len)

        return self.examples.read(index, encoded)

    def check(self, index: int) -> None:
        """Raise DataExampleError if the example at ``index`` of the data set cannot be used."""
        self.examples.read(index, self.template.mark)

    def dealt(self, examples: Sequence[EncodedExample]) -> list[list[int]]:
        """Return which of a window's examples go into each of its sequences."""
        if not self.packing:
            return [[place] for place in range(len(examples))]
        return pack([example.n_tokens for example in examples], self.seq_len)

    def sample(self, examples: Sequence[EncodedExample], rows: Sequence[int]) -> Sample:
        """Return the sequence of examples that go together.

        Args:
            examples: One, or when packing any number.
            rows: Index of each in the data set. A packed sequence is another one in the next epoch,
                so it has no name.
        """
        if not self.packing:
            ((example, row),) = zip(examples, rows, strict=True)
            inputs = {"input": example.input_ids, "n_tokens": torch.tensor(example.n_tokens)}
            return inputs | {ROWS: torch.tensor(row)}, example.labels
        packed = join_examples(examples, self.seq_len, pad_id(self.tokenizer))
        inputs = {"input": packed.input_ids, "n_tokens": torch.tensor(packed.n_tokens)}
        return inputs | {POSITIONS: packed.positions}, packed.labels

    @property
    def packed_as(self) -> str | None:
        """What a window's sequences depend on besides its examples; None without packing."""
        return f"{self.seq_len} tokens, {self.template.name}" if self.packing else None


class PackedSequence(NamedTuple):
    """Examples one behind the other; T is ``seq_len``.

    Args:
        input_ids: int64, [T], padded on the right.
        labels: int64, [T], the next token of the same example where it is learned, else -100.
        positions: int64, [T], the place of each token in its example, from 0; the padding counts as
            one more example.
        n_tokens: Number of input tokens that are no padding.
    """

    input_ids: Tensor
    labels: Tensor
    positions: Tensor
    n_tokens: int


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Choose which examples share a sequence, by first fit, longest examples first.

    No example is split. An example goes into the first sequence that has room for it.

    Args:
        lengths: Tokens of each example, each from 1 to ``capacity``.
        capacity: Tokens of a sequence.

    Returns:
        For each sequence the places of its examples in ``lengths``, ascending; sequences are in the
        order of their first examples, each place is in one of them.

    Raises:
        ValueError: If a length is out of range.
    """
    rooms: list[int] = []
    sequences: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        length = lengths[place]
        if not 1 <= length <= capacity:
            raise ValueError(f"example {place} has {length} tokens; it must have 1 to {capacity}")
        number = next((n for n, room in enumerate(rooms) if length <= room), len(rooms))
        if number == len(rooms):
            rooms.append(capacity)
            sequences.append([])
        rooms[number] -= length
        sequences[number].append(place)
    return sorted(sorted(sequence) for sequence in sequences)


def join_examples(examples: Sequence[EncodedExample], seq_len: int, pad_id: int) -> PackedSequence:
    """Put examples one behind the other and fill up with padding.

    Args:
        examples: At least one, together at most ``seq_len`` tokens.
        seq_len: T.
        pad_id: Fills the input behind the examples.
    """
    input_ids = torch.full((seq_len,), pad_id, dtype=torch.int64)
    labels = torch.full((seq_len,), IGNORE_INDEX, dtype=torch.int64)
    positions = torch.empty(seq_len, dtype=torch.int64)
    start = 0
    for example in examples:
        end = start + example.n_tokens
        input_ids[start:end] = example.input_ids[: example.n_tokens]
        labels[start:end] = example.labels[: example.n_tokens]
        positions[start:end] = torch.arange(example.n_tokens)
        start = end
    positions[start:] = torch.arange(seq_len - start)
    return PackedSequence(input_ids, labels, positions, start)


def sequence_text(
    inputs: dict[str, Tensor], labels: Tensor, decode: Callable[[list[int]], str]
) -> str:
    """Return the examples of a sequence line by line; learned text is marked in the margin.

    Args:
        inputs: ``"input"``, int64 [T]; ``"n_tokens"``, int64 []; ``"positions"``, int64 [T], if
            packed. As an instruction data set yields them.
        labels: int64, [T].
        decode: From token ids to text, special tokens included.

    Returns:
        A heading with the number of examples and tokens, then each example. Padding is only
        counted.
    """
    ids, n_tokens = inputs["input"], int(inputs["n_tokens"])
    positions = inputs.get(POSITIONS, torch.arange(len(ids)))
    starts = (positions[:n_tokens] == 0).nonzero().flatten().tolist()
    n_learned = int((labels != IGNORE_INDEX).sum())
    lines = [
        f"{len(starts)} {'example' if len(starts) == 1 else 'examples'}, {n_tokens} tokens and "
        f"{len(ids) - n_tokens} of padding; {n_learned} targets"
    ]
    for start, end in zip(starts, [*starts[1:], n_tokens], strict=True):
        lines.append("")
        lines += _example_lines(ids[start:end].tolist(), labels[start:end].tolist(), decode)
    return "\n".join(lines)


def _example_lines(
    ids: Sequence[int], labels: Sequence[int], decode: Callable[[list[int]], str]
) -> Iterator[str]:
    """Yield the lines of one example; a label belongs to the token behind its place."""
    tokens = list(zip([False, *(label != IGNORE_INDEX for label in labels)], ids, strict=False))
    if labels[-1] != IGNORE_INDEX:  # the last target is no input any more
        tokens.append((True, labels[-1]))
    for learned, run in groupby(tokens, key=lambda token: token[0]):
        text = decode([token for _, token in run])
        for line in text.removesuffix("\n").split("\n"):
            yield (LEARNED if learned else READ) + line
