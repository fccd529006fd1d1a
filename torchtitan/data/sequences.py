"""Sequences of instruction data: tokens of an example or, packed, of several; text for people.

Examples are packed in windows of consecutive examples of a stream. A window's sequences depend on
its examples alone, so a stream is resumed by the numbers of window and sequence.

The last stage computes logits of learned tokens alone. Their places are found on the host, where a
batch comes from, without waiting for a device.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import default_collate
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

from torchtitan.data.chat_template import ChatTemplate, ChatTemplateError, require_words
from torchtitan.data.rows.messages import ASSISTANT, Conversation, Message
from torchtitan.data.text.renderer import MOST_CHARACTERS

IGNORE_INDEX = -100
# Names of what the model gets: places and labels of learned tokens, and how many each row has.
LEARNED, N_LEARNED = "learned", "n_learned"


class Turn(NamedTuple):
    """A piece of an example: a learned answer, a given answer, or neither."""

    role: str
    text: str
    is_target: bool
    is_given: bool = False


class EncodedExample(NamedTuple):
    """An example as tokens, int64 [T], padded on the right; T is ``seq_len``.

    Labels are the next token if learned, else -100. ``n_tokens`` counts no padding, ``n_cut`` the
    tokens beyond T.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    n_tokens: int
    n_cut: int

    @property
    def has_target(self) -> bool:
        """Whether any token of an answer is left to learn."""
        return bool((self.labels != IGNORE_INDEX).any())


class PlainTemplate:
    """Our own plain format, for any tokenizer: headers in words, no special tokens.

    An instruction is written as in Alpaca, other messages under the name of their role. Turns are
    encoded separately, so that no token spans a prompt and an answer. The tokenizer's end token
    follows answers and is learned too; its begin token opens the example. Missing tokens are left
    out.
    """

    name = "plain"

    def mark(self, said: Conversation) -> list[Turn]:
        """Return a conversation in turns; ChatTemplateError for tools or excessive length."""
        require_words(self.name, "", said)
        turns: list[Turn] = []
        for before, message in zip((None, *said.messages), said.messages, strict=False):
            # An instruction is written with the header of its answer.
            follows = before is not None and before.context is not None
            turns += _turns(message, follows_instruction=follows)
        if sum(len(turn.text) for turn in turns) > MOST_CHARACTERS:
            raise ChatTemplateError(f"its text has more than {MOST_CHARACTERS} characters")
        return turns

    def tokens(self, said: Conversation, tokenizer: BaseTokenizer) -> tuple[list[int], list[bool]]:
        """Return the tokens of a conversation, and the learned among them; see :meth:`mark`."""
        turns = self.mark(said)
        bos, eos = getattr(tokenizer, "bos_id", None), tokenizer.eos_id
        ids = [] if bos is None else [bos]
        learned = [False] * len(ids)
        for turn in turns:
            if isinstance(tokenizer, HuggingFaceTokenizer):
                # Its own encode() cannot keep a tokenizer's post-processor from adding a begin
                # token to every piece (hf_adds_bos).
                piece = list(tokenizer.tokenizer.encode(turn.text, add_special_tokens=False).ids)
            else:
                piece = list(tokenizer.encode(turn.text, add_bos=False, add_eos=False))
            if (turn.is_target or turn.is_given) and eos is not None:
                piece.append(eos)
            ids += piece
            learned += [turn.is_target] * len(piece)
        return ids, learned


def _turns(message: Message, *, follows_instruction: bool) -> list[Turn]:
    role, content = message.role, message.content
    if message.context is not None:
        source = f"### Input:\n{message.context}\n\n" if message.context else ""
        return [Turn(role, f"### Instruction:\n{content}\n\n{source}### Response:\n", False)]
    header = f"### {role.capitalize()}:\n"
    if role != ASSISTANT:
        return [Turn(role, f"{header}{content}\n\n", is_target=False)]
    answer = Turn(role, content, message.is_answer, is_given=message.is_given)
    return [answer] if follows_instruction else [Turn(role, header, is_target=False), answer]


PLAIN_TEMPLATE = PlainTemplate()


Template = PlainTemplate | ChatTemplate


def encode(
    said: Conversation, template: Template, tokenizer: BaseTokenizer, seq_len: int
) -> EncodedExample:
    """Encode an example, cut or padded to ``seq_len``; every label is -100 if no answer fits."""
    ids, learned = template.tokens(said, tokenizer)
    n_tokens = min(max(len(ids) - 1, 0), seq_len)
    input_ids = torch.full((seq_len,), pad_id(tokenizer), dtype=torch.int64)
    labels = torch.full((seq_len,), IGNORE_INDEX, dtype=torch.int64)
    input_ids[:n_tokens] = torch.tensor(ids[:n_tokens], dtype=torch.int64)
    targets = torch.tensor(ids[1 : n_tokens + 1], dtype=torch.int64)
    mask = torch.tensor(learned[1 : n_tokens + 1], dtype=torch.bool)
    labels[:n_tokens] = torch.where(mask, targets, IGNORE_INDEX)
    return EncodedExample(input_ids, labels, n_tokens, max(len(ids) - 1 - seq_len, 0))


def pad_id(tokenizer: BaseTokenizer) -> int:
    """The id of padding behind the example; any id will do, without labels there."""
    known = (getattr(tokenizer, "pad_id", None), tokenizer.eos_id)
    return next((token for token in known if token is not None), 0)


Sample = tuple[dict[str, Tensor], Tensor]
Batch = tuple["Inputs", Tensor]
# The loader's name, and the model's, for the place of each token in its example.
POSITIONS = "positions"
# The same for how many tokens each example has; the padding counts as one more.
LENGTHS = "lengths"
# The loader's name for which example of the data set a sequence is.
ROWS = "rows"

# Examples packed together: enough that what stays empty in a window's last sequences is little, and
# few enough that encoding them is no pause.
WINDOW_EXAMPLES = 128
# The margin of a sequence as text.
_READ, _IS_LEARNED = "        | ", "learned | "


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Choose the examples of sequences by first fit, longest examples first.

    No example is split. An example goes into the first sequence with room. Lengths are from 1 to
    ``capacity``. Returns each sequence's places in ``lengths``, ascending; sequences are in the
    order of their first examples, with all places once.
    """
    rooms: list[int] = []
    sequences: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        length = lengths[place]
        number = next((n for n, room in enumerate(rooms) if length <= room), len(rooms))
        if number == len(rooms):
            rooms.append(capacity)
            sequences.append([])
        rooms[number] -= length
        sequences[number].append(place)
    return sorted(sorted(sequence) for sequence in sequences)


def join_examples(examples: Sequence[EncodedExample], seq_len: int, pad_id: int) -> Sample:
    """Join examples of at most T = ``seq_len`` tokens, then padding.

    Labels are as in an example. ``positions``, int64 [T], are places of tokens in their example,
    from 0; the padding counts as another example. ``lengths``, int32 [examples + 1], are their
    tokens, T together. ``n_tokens`` counts no padding.
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
    lengths = [*(example.n_tokens for example in examples), seq_len - start]
    inputs = {"input": input_ids, "n_tokens": torch.tensor(start), POSITIONS: positions}
    return inputs | {LENGTHS: torch.tensor(lengths, dtype=torch.int32)}, labels


class Inputs(dict[str, Tensor]):
    """A batch's inputs of the model by name, and beside them counts and rows, on the host.

    Upstream's loop hands it on as it is, and torch copies it whole into pinned memory.
    """

    def __init__(self, named: dict[str, Tensor]) -> None:
        super().__init__(named)
        self.n_tokens: Any = self.pop("n_tokens", None)  # [B], without padding; None for pictures
        self.rows = self.pop(ROWS, None)  # [B]; None if packed


def as_batch(samples: Sequence[Sample]) -> Batch:
    """Return samples as a batch; ``lengths``, [B, K], end in zeros, K is a power of 2.

    So there are few shapes, and a kernel's work, growing with K, stays little.
    """
    counts = [len(inputs[LENGTHS]) for inputs, _ in samples if LENGTHS in inputs]
    n_documents = 1 << (max(counts, default=1) - 1).bit_length()
    for (inputs, _), count in zip(samples, counts, strict=False):
        inputs[LENGTHS] = F.pad(inputs[LENGTHS], (0, n_documents - count))
    inputs, labels = default_collate(list(samples))
    return Inputs(inputs), labels


def sequence_text(
    inputs: dict[str, Tensor], labels: Tensor, decode: Callable[[list[int]], str]
) -> str:
    """Return the examples of a sequence line by line; learned text is marked in the margin."""
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
    """Yield the lines of an example; a label belongs to the token behind its place."""
    tokens = list(zip([False, *(label != IGNORE_INDEX for label in labels)], ids, strict=False))
    if labels[-1] != IGNORE_INDEX:  # the last target is no input any more
        tokens.append((True, labels[-1]))
    for learned, run in groupby(tokens, key=lambda token: token[0]):
        text = decode([token for _, token in run])
        for line in text.removesuffix("\n").split("\n"):
            yield (_IS_LEARNED if learned else _READ) + line


class HostTensor(Tensor):
    """A tensor staying on the host, although upstream or FSDP moves its batch to a device."""

    def to(self, *args: Any, **kwargs: Any) -> "HostTensor":
        """Return this tensor unchanged."""
        return self


def learned_tokens(labels: Tensor) -> dict[str, Tensor]:
    """Return the learned tokens of a batch from its labels, int64 [B, T], on the host.

    ``learned``, int64 [B, 2, T], are places in the row and their labels, learned tokens first, in
    ascending order. ``n_learned``, int64 [B], counts them by row, and stays on the host.
    """
    if labels.device.type != "cpu":
        raise ValueError(f"labels are on {labels.device}; learned tokens are found on the host")
    is_learned = labels != IGNORE_INDEX
    places = is_learned.logical_not().byte().argsort(dim=1, stable=True)
    learned = torch.stack([places, labels.gather(1, places)], dim=1)
    return {LEARNED: learned, N_LEARNED: is_learned.sum(dim=1).as_subclass(HostTensor)}


def to_every_stage(
    extra_inputs: dict[str, Tensor], extra_kwargs: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Move all stages' inputs out of the first pipeline stage's inputs."""
    every = (POSITIONS, LENGTHS, LEARNED, N_LEARNED)
    first = {name: value for name, value in extra_inputs.items() if name not in every}
    moved = {name: value for name, value in extra_inputs.items() if name in every}
    return first, extra_kwargs | moved
