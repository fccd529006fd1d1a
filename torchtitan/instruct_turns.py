"""From a row to tokens: what each kind of instruction data looks like to the model.

A formatter is a pure function from a row to turns; ``encode_row`` makes tokens and labels of them.
A new kind of data, or a chat template, is a new formatter in ``INSTRUCT_DATASETS``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer
from torchtitan.instruct_rows import FieldError, kind_of

IGNORE_INDEX = -100

SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
}


class Turn(NamedTuple):
    """A piece of a row: who speaks, the text as the model reads it, and whether it is learned."""

    role: str
    text: str
    is_target: bool


Formatter = Callable[[dict[str, Any]], list[Turn]]


def format_alpaca(row: dict[str, Any]) -> list[Turn]:
    """Turn ``{instruction, input, output}`` into a prompt and its answer.

    The input's header is left out where the input is empty.

    Raises:
        FieldError: If a field is missing or no string, or the instruction is empty.
    """
    instruction, source, output = (_text(row, f) for f in ("instruction", "input", "output"))
    if not instruction.strip():
        raise FieldError("instruction", "is empty; expected a text")
    prompt = f"### Instruction:\n{instruction}\n\n"
    if source.strip():
        prompt += f"### Input:\n{source}\n\n"
    return [
        Turn("user", f"{prompt}### Response:\n", is_target=False),
        Turn("assistant", output, is_target=True),
    ]


def format_sharegpt(row: dict[str, Any]) -> list[Turn]:
    """Turn ``{conversations: [{from, value}, ...]}`` into turns; every answer is learned.

    Raises:
        FieldError: If the conversation is empty or has no answer, a field is missing or of a wrong
            type, or a speaker is unknown.
    """
    messages = row.get("conversations")
    if not isinstance(messages, list):
        raise FieldError("conversations", f"is {kind_of(messages)}; expected a list of messages")
    if not messages:
        raise FieldError("conversations", "is empty; expected at least one message")
    turns = []
    for i, message in enumerate(messages):
        place = f"conversations[{i}]"
        if not isinstance(message, dict):
            raise FieldError(place, f"is {kind_of(message)}; expected an object with from, value")
        speaker, value = _text(message, "from", place), _text(message, "value", place)
        if speaker not in SPEAKERS:
            raise FieldError(f"{place}.from", f"is {speaker!r}; expected one of {list(SPEAKERS)}")
        role = SPEAKERS[speaker]
        header = f"### {role.capitalize()}:\n"
        if role == "assistant":
            turns += [Turn(role, header, is_target=False), Turn(role, value, is_target=True)]
        else:
            turns.append(Turn(role, f"{header}{value}\n\n", is_target=False))
    if not any(turn.is_target for turn in turns):
        raise FieldError("conversations", "has no answer; expected a message from gpt or assistant")
    return turns


def _text(row: dict[str, Any], field: str, place: str = "") -> str:
    name = f"{place}.{field}" if place else field
    if field not in row:
        raise FieldError(name, "is missing; expected a string")
    if not isinstance(row[field], str):
        raise FieldError(name, f"is {kind_of(row[field])}; expected a string")
    return row[field]


@dataclass(frozen=True)
class InstructSpec:
    """A kind of instruction data: hub name by default, fields it reads, row -> turns."""

    default_path: str
    fields: tuple[str, ...]
    formatter: Formatter


INSTRUCT_DATASETS = {
    "alpaca": InstructSpec(
        "vicgalle/alpaca-gpt4", ("instruction", "input", "output"), format_alpaca
    ),
    "sharegpt": InstructSpec("teknium/OpenHermes-2.5", ("conversations",), format_sharegpt),
}


def is_instruct_dataset(name: str) -> bool:
    """Whether ``training.dataset`` names instruction data; other names are upstream's."""
    return name.lower() in INSTRUCT_DATASETS


class EncodedRow(NamedTuple):
    """A row as tokens; T is ``seq_len``.

    Args:
        input_ids: int64, [T], padded on the right.
        labels: int64, [T], the next token where it is learned, else -100.
        n_tokens: Number of input tokens that are no padding.
        n_cut: Number of tokens that did not fit into T.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    n_tokens: int
    n_cut: int

    @property
    def has_target(self) -> bool:
        """Whether any token of an answer is left to learn."""
        return bool((self.labels != IGNORE_INDEX).any())


def encode_row(turns: list[Turn], tokenizer: BaseTokenizer, seq_len: int) -> EncodedRow:
    """Encode turns for next-token prediction, cut or padded to ``seq_len``.

    Each turn is encoded on its own, so that no token spans a prompt and an answer. The tokenizer's
    end token follows each answer and is learned with it; its begin token, if any, opens the row.

    Args:
        turns: Pieces of the row in order.
        tokenizer: Its ``eos_id`` or ``bos_id`` may be None; that token is then left out.
        seq_len: T, at least 1.

    Returns:
        EncodedRow: See there. If no answer fits, every label is -100.
    """
    bos, eos = getattr(tokenizer, "bos_id", None), tokenizer.eos_id
    ids = [] if bos is None else [bos]
    learned = [False] * len(ids)
    for turn in turns:
        piece = _encode_piece(tokenizer, turn.text)
        if turn.is_target and eos is not None:
            piece.append(eos)
        ids += piece
        learned += [turn.is_target] * len(piece)
    n_tokens = min(max(len(ids) - 1, 0), seq_len)
    input_ids = torch.full((seq_len,), _pad_id(tokenizer), dtype=torch.int64)
    labels = torch.full((seq_len,), IGNORE_INDEX, dtype=torch.int64)
    input_ids[:n_tokens] = torch.tensor(ids[:n_tokens], dtype=torch.int64)
    targets = torch.tensor(ids[1 : n_tokens + 1], dtype=torch.int64)
    mask = torch.tensor(learned[1 : n_tokens + 1], dtype=torch.bool)
    labels[:n_tokens] = torch.where(mask, targets, IGNORE_INDEX)
    return EncodedRow(input_ids, labels, n_tokens, max(len(ids) - 1 - seq_len, 0))


def _encode_piece(tokenizer: BaseTokenizer, text: str) -> list[int]:
    if isinstance(tokenizer, HuggingFaceTokenizer):
        # Its own encode() cannot keep a tokenizer's post-processor from adding a begin token to
        # every piece (hf_adds_bos).
        return list(tokenizer.tokenizer.encode(text, add_special_tokens=False).ids)
    return list(tokenizer.encode(text, add_bos=False, add_eos=False))


def _pad_id(tokenizer: BaseTokenizer) -> int:
    """The id that fills the input behind the row; any id will do, since no label is there."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        token = (tokenizer.config or {}).get("pad_token")
        content = token.get("content") if isinstance(token, dict) else token
        pad = None if content is None else tokenizer.token_to_id(content)
        if pad is not None:
            return pad
    return 0 if tokenizer.eos_id is None else tokenizer.eos_id
