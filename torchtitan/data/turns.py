"""From an example to tokens: what each kind of instruction data looks like to the model.

Each kind of data has a reader, from an example to messages for chat templates, and a formatter,
from an example to turns for the plain format. A new kind is a new entry of ``INSTRUCT_DATASETS``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

from torchtitan.data.chat_template import ChatTemplate
from torchtitan.data.messages import Message, MessageReader, alpaca_messages, sharegpt_messages

IGNORE_INDEX = -100


class Turn(NamedTuple):
    """A piece of an example: who speaks, the text that the model reads, whether it is learned."""

    role: str
    text: str
    is_target: bool


Formatter = Callable[[dict[str, Any]], list[Turn]]


def format_alpaca(example: dict[str, Any]) -> list[Turn]:
    """Turn ``{instruction, input, output}`` into a prompt and its answer.

    The input's header is left out where the input is empty.

    Raises:
        FieldError: As in :func:`alpaca_messages`.
    """
    question, answer = alpaca_messages(example)
    prompt = f"### Instruction:\n{question.content}\n\n"
    if question.context:
        prompt += f"### Input:\n{question.context}\n\n"
    return [
        Turn("user", f"{prompt}### Response:\n", is_target=False),
        Turn("assistant", answer.content, is_target=True),
    ]


def format_sharegpt(example: dict[str, Any]) -> list[Turn]:
    """Turn ``{conversations: [{from, value}, ...]}`` into turns; every answer is learned.

    Raises:
        FieldError: As in :func:`sharegpt_messages`.
    """
    turns = []
    for role, content, _ in sharegpt_messages(example):
        header = f"### {role.capitalize()}:\n"
        if role == "assistant":
            turns += [Turn(role, header, is_target=False), Turn(role, content, is_target=True)]
        else:
            turns.append(Turn(role, f"{header}{content}\n\n", is_target=False))
    return turns


@dataclass(frozen=True)
class InstructSpec:
    """A kind of instruction data: its name on the hub, its fields, example -> turns, messages."""

    default_path: str
    fields: tuple[str, ...]
    formatter: Formatter
    messages: MessageReader


INSTRUCT_DATASETS = {
    "alpaca": InstructSpec(
        "vicgalle/alpaca-gpt4", ("instruction", "input", "output"), format_alpaca, alpaca_messages
    ),
    "sharegpt": InstructSpec(
        "teknium/OpenHermes-2.5", ("conversations",), format_sharegpt, sharegpt_messages
    ),
}


def is_instruct_dataset(name: str) -> bool:
    """Whether ``training.dataset`` names instruction data; other names are upstream's."""
    return name.lower() in INSTRUCT_DATASETS


def has_turns(name: str) -> bool:
    """Whether examples of the data set ``name`` may have several answers."""
    return is_instruct_dataset(name) and "conversations" in INSTRUCT_DATASETS[name.lower()].fields


class EncodedExample(NamedTuple):
    """An example as tokens; T is ``seq_len``.

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


class PlainTemplate:
    """Our own plain format, for any tokenizer: turns instead of messages, no special tokens.

    Each turn is encoded on its own, so that no token spans a prompt and an answer. The tokenizer's
    end token follows each answer and is learned with it; its begin token opens the example. Either
    is left out where the tokenizer has none.
    """

    name = "plain"

    def mark(self, turns: list[Turn]) -> list[Turn]:
        """Return ``turns``, which say themselves what is learned."""
        return turns

    def tokens(self, turns: list[Turn], tokenizer: BaseTokenizer) -> tuple[list[int], list[bool]]:
        """Return the tokens of ``turns``, and which of them are learned."""
        bos, eos = getattr(tokenizer, "bos_id", None), tokenizer.eos_id
        ids = [] if bos is None else [bos]
        learned = [False] * len(ids)
        for turn in turns:
            piece = _encode_piece(tokenizer, turn.text)
            if turn.is_target and eos is not None:
                piece.append(eos)
            ids += piece
            learned += [turn.is_target] * len(piece)
        return ids, learned


PLAIN_TEMPLATE = PlainTemplate()
Template = PlainTemplate | ChatTemplate


def encode(
    said: list[Turn] | list[Message], template: Template, tokenizer: BaseTokenizer, seq_len: int
) -> EncodedExample:
    """Encode an example for next-token prediction, cut or padded to ``seq_len``.

    Args:
        said: Turns for the plain format, messages for a chat template.
        template: Writes tokens and says which are learned.
        tokenizer: A Hugging Face one for a chat template.
        seq_len: T, at least 1.

    Returns:
        EncodedExample: See there. If no answer fits, every label is -100.

    Raises:
        ChatTemplateError: If the template refuses the conversation.
    """
    ids, learned = template.tokens(said, tokenizer)
    n_tokens = min(max(len(ids) - 1, 0), seq_len)
    input_ids = torch.full((seq_len,), pad_id(tokenizer), dtype=torch.int64)
    labels = torch.full((seq_len,), IGNORE_INDEX, dtype=torch.int64)
    input_ids[:n_tokens] = torch.tensor(ids[:n_tokens], dtype=torch.int64)
    targets = torch.tensor(ids[1 : n_tokens + 1], dtype=torch.int64)
    mask = torch.tensor(learned[1 : n_tokens + 1], dtype=torch.bool)
    labels[:n_tokens] = torch.where(mask, targets, IGNORE_INDEX)
    return EncodedExample(input_ids, labels, n_tokens, max(len(ids) - 1 - seq_len, 0))


def _encode_piece(tokenizer: BaseTokenizer, text: str) -> list[int]:
    if isinstance(tokenizer, HuggingFaceTokenizer):
        # Its own encode() cannot keep a tokenizer's post-processor from adding a begin token to
        # every piece (hf_adds_bos).
        return list(tokenizer.tokenizer.encode(text, add_special_tokens=False).ids)
    return list(tokenizer.encode(text, add_bos=False, add_eos=False))


def pad_id(tokenizer: BaseTokenizer) -> int:
    """The id that fills the input behind the example; any id will do, since no label is there."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        token = (tokenizer.config or {}).get("pad_token")
        content = token.get("content") if isinstance(token, dict) else token
        pad = None if content is None else tokenizer.token_to_id(content)
        if pad is not None:
            return pad
    return 0 if tokenizer.eos_id is None else tokenizer.eos_id
