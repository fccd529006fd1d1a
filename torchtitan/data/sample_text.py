"""A sequence of instruction data as text for people: what the model reads, and what it learns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from torchtitan.data.packing import POSITIONS
from torchtitan.data.turns import IGNORE_INDEX

READ, LEARNED = "        | ", "learned | "


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
        A heading with the number of examples and tokens, then each example. Padding is only counted.
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
    tokens = [
        (False, ids[0]),
        *((label != IGNORE_INDEX, token) for label, token in _next(ids, labels)),
    ]
    for learned, run in groupby(tokens, key=lambda token: token[0]):
        text = decode([token for _, token in run])
        for line in text.removesuffix("\n").split("\n"):
            yield (LEARNED if learned else READ) + line


def _next(ids: Sequence[int], labels: Sequence[int]) -> Iterator[tuple[int, int]]:
    yield from zip(labels, ids[1:], strict=False)
    if labels[-1] != IGNORE_INDEX:  # the last target is no input any more
        yield labels[-1], labels[-1]
