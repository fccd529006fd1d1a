"""What examples of instruction data become: tokens, and sequences of one example or, packed, of several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchtitan.components.tokenizer import BaseTokenizer

from torchtitan.data.chat_template import ChatTemplate, ChatTemplateError
from torchtitan.data.examples import DataExampleError, FieldError, InstructExamples
from torchtitan.data.messages import Message, MessageReader
from torchtitan.data.packing import POSITIONS, join_rows, pack
from torchtitan.data.turns import (
    EncodedExample,
    Formatter,
    Turn,
    encode_chat,
    encode_example,
    pad_id,
)

Sample = tuple[dict[str, torch.Tensor], torch.Tensor]


class ExampleSequences:
    """Makes sequences of examples; arguments are those of ``InstructDataset``."""

    def __init__(
        self,
        examples: InstructExamples,
        formatter: Formatter | MessageReader,
        tokenizer: BaseTokenizer,
        seq_len: int,
        template: ChatTemplate | None,
        packing: bool,
    ) -> None:
        self._examples = examples
        self._formatter = formatter
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._template = template
        self._packing = packing

    def turns(self, index: int) -> list[Turn] | list[Message]:
        """The turns of the example at ``index`` of the data set; with a template its messages."""
        try:
            return self._formatter(self._examples[index])
        except FieldError as error:
            raise DataExampleError(
                *self._examples.place(index), error.problem, error.field
            ) from error

    def encode(self, index: int) -> EncodedExample:
        """The tokens of the example at ``index`` of the data set."""
        turns = self.turns(index)
        if self._template is None:
            return encode_example(turns, self._tokenizer, self._seq_len)
        try:
            return encode_chat(turns, self._template, self._tokenizer, self._seq_len)
        except ChatTemplateError as error:
            raise DataExampleError(*self._examples.place(index), str(error)) from error

    def check(self, index: int) -> None:
        """Raise DataExampleError if the example at ``index`` of the data set cannot be used."""
        turns = self.turns(index)
        if self._template is None:
            return
        try:
            self._template.mark(turns)
        except ChatTemplateError as error:
            raise DataExampleError(*self._examples.place(index), str(error)) from error

    def dealt(self, examples: Sequence[EncodedExample]) -> list[list[int]]:
        """Return which of a window's examples go into each of its sequences."""
        if not self._packing:
            return [[place] for place in range(len(examples))]
        return pack([example.n_tokens for example in examples], self._seq_len)

    def sample(self, examples: Sequence[EncodedExample]) -> Sample:
        """Return the sequence of examples that go together."""
        if not self._packing:
            (example,) = examples
            return {
                "input": example.input_ids,
                "n_tokens": _count(example.n_tokens),
            }, example.labels
        packed = join_rows(examples, self._seq_len, pad_id(self._tokenizer))
        inputs = {
            "input": packed.input_ids,
            "n_tokens": _count(packed.n_tokens),
            POSITIONS: packed.positions,
        }
        return inputs, packed.labels

    @property
    def packed_as(self) -> str | None:
        """What a window's sequences depend on besides its examples; None where a window is a example."""
        if not self._packing:
            return None
        template = "no template" if self._template is None else self._template.name
        return f"{self._seq_len} tokens, {template}"


def _count(n_tokens: int) -> torch.Tensor:
    return torch.tensor(n_tokens, dtype=torch.int64)
