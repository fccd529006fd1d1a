"""What rows of instruction data become: tokens, and sequences of one row or, packed, of several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchtitan.components.tokenizer import BaseTokenizer

from torchtitan.data.chat_template import ChatTemplate, ChatTemplateError
from torchtitan.data.messages import Message, MessageReader
from torchtitan.data.packing import POSITIONS, join_rows, pack
from torchtitan.data.rows import DataRowError, FieldError, InstructRows
from torchtitan.data.turns import (
    EncodedRow,
    Formatter,
    Turn,
    encode_chat,
    encode_row,
    pad_id,
)

Sample = tuple[dict[str, torch.Tensor], torch.Tensor]


class RowSequences:
    """Makes sequences of rows; arguments are those of ``InstructDataset``."""

    def __init__(
        self,
        rows: InstructRows,
        formatter: Formatter | MessageReader,
        tokenizer: BaseTokenizer,
        seq_len: int,
        template: ChatTemplate | None,
        packing: bool,
    ) -> None:
        self._rows = rows
        self._formatter = formatter
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._template = template
        self._packing = packing

    def turns(self, index: int) -> list[Turn] | list[Message]:
        """The turns of the row at ``index`` of the data set; with a template its messages."""
        try:
            return self._formatter(self._rows[index])
        except FieldError as error:
            raise DataRowError(*self._rows.place(index), error.problem, error.field) from error

    def encode(self, index: int) -> EncodedRow:
        """The tokens of the row at ``index`` of the data set."""
        turns = self.turns(index)
        if self._template is None:
            return encode_row(turns, self._tokenizer, self._seq_len)
        try:
            return encode_chat(turns, self._template, self._tokenizer, self._seq_len)
        except ChatTemplateError as error:
            raise DataRowError(*self._rows.place(index), str(error)) from error

    def check(self, index: int) -> None:
        """Raise DataRowError if the row at ``index`` of the data set cannot be used."""
        turns = self.turns(index)
        if self._template is None:
            return
        try:
            self._template.mark(turns)
        except ChatTemplateError as error:
            raise DataRowError(*self._rows.place(index), str(error)) from error

    def dealt(self, rows: Sequence[EncodedRow]) -> list[list[int]]:
        """Return which of a window's rows go into each of its sequences."""
        if not self._packing:
            return [[place] for place in range(len(rows))]
        return pack([row.n_tokens for row in rows], self._seq_len)

    def sample(self, rows: Sequence[EncodedRow]) -> Sample:
        """Return the sequence of rows that go together."""
        if not self._packing:
            (row,) = rows
            return {"input": row.input_ids, "n_tokens": _count(row.n_tokens)}, row.labels
        packed = join_rows(rows, self._seq_len, pad_id(self._tokenizer))
        inputs = {
            "input": packed.input_ids,
            "n_tokens": _count(packed.n_tokens),
            POSITIONS: packed.positions,
        }
        return inputs, packed.labels

    @property
    def packed_as(self) -> str | None:
        """What a window's sequences depend on besides its rows; None where a window is a row."""
        if not self._packing:
            return None
        template = "no template" if self._template is None else self._template.name
        return f"{self._seq_len} tokens, {template}"


def _count(n_tokens: int) -> torch.Tensor:
    return torch.tensor(n_tokens, dtype=torch.int64)
