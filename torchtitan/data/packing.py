"""Several examples in one sequence: which go together, and what the sequence looks like.

Examples are packed in windows of consecutive examples of a stream. What a window becomes depends on its
examples alone, so a stream is resumed by the number of its window and of the sequence in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan.data.turns import IGNORE_INDEX, EncodedExample

# The loader's name, and the model's, for the place of each token in its example.
POSITIONS = "positions"

# Examples packed together: enough that what stays empty in a window's last sequences is little, and
# few enough that encoding them is no pause.
WINDOW_ROWS = 128


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

    No example is split. A example goes into the first sequence that has room for it.

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


def join_rows(examples: Sequence[EncodedExample], seq_len: int, pad_id: int) -> PackedSequence:
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
