"""Turns of a conversation as tokens: what is read, and what is learned."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

from torchtitan.data.chat_template import ChatTemplate, ChatTemplateError, require_words
from torchtitan.data.rows.messages import (
    ASSISTANT,
    Conversation,
    Message,
)
from torchtitan.data.text.renderer import MOST_CHARACTERS

IGNORE_INDEX = -100


class Turn(NamedTuple):
    """A piece of an example.

    Args:
        role: Who speaks.
        text: What the model reads.
        is_target: Whether it is an answer that is learned.
        is_given: Whether it is one that is not, which ends in the same way.
    """

    role: str
    text: str
    is_target: bool
    is_given: bool = False


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
    """Our own plain format, for any tokenizer: headers in words, no special tokens.

    An instruction is written as in Alpaca, other messages under the name of their role. Each turn
    is encoded on its own, so that no token spans a prompt and an answer. The tokenizer's end token
    follows each answer and is learned with it; its begin token opens the example. Either is left
    out where the tokenizer has none.
    """

    name = "plain"

    def mark(self, said: Conversation) -> list[Turn]:
        """Return a conversation in turns, which say what is learned.

        Raises:
            ChatTemplateError: If it has tools, for which the format has no words, or its text is
                longer than can be encoded.
        """
        require_words(self.name, "", said)
        turns: list[Turn] = []
        for before, message in zip((None, *said.messages), said.messages, strict=False):
            turns += _turns(message, follows_instruction=_is_instruction(before))
        if sum(len(turn.text) for turn in turns) > MOST_CHARACTERS:
            raise ChatTemplateError(f"its text has more than {MOST_CHARACTERS} characters")
        return turns

    def tokens(self, said: Conversation, tokenizer: BaseTokenizer) -> tuple[list[int], list[bool]]:
        """Return the tokens of a conversation, and which of them are learned; see :meth:`mark`."""
        turns = self.mark(said)
        bos, eos = getattr(tokenizer, "bos_id", None), tokenizer.eos_id
        ids = [] if bos is None else [bos]
        learned = [False] * len(ids)
        for turn in turns:
            piece = _encode_piece(tokenizer, turn.text)
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


def _is_instruction(message: Message | None) -> bool:
    """Whether a message is written with the header of its answer."""
    return message is not None and message.context is not None


PLAIN_TEMPLATE = PlainTemplate()


Template = PlainTemplate | ChatTemplate


def encode(
    said: Conversation, template: Template, tokenizer: BaseTokenizer, seq_len: int
) -> EncodedExample:
    """Encode an example for next-token prediction, cut or padded to ``seq_len``.

    Args:
        said: The example.
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
    known = (getattr(tokenizer, "pad_id", None), tokenizer.eos_id)
    return next((token for token in known if token is not None), 0)
