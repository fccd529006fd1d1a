"""Sequences of instruction data for fine-tuning, in a stream that is resumable to the row.

Only answers are learned (see ``torchtitan.instruct_turns``). A row is encoded on its own while
training. A sequence of ``seq_len`` tokens is one row and padding, or, packed, as many rows as fit
(see ``torchtitan.instruct_packing``); either way no answer sees another row.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset, get_worker_info

from torchtitan.chat_template import ChatTemplate, ChatTemplateError
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.instruct_messages import Message, MessageReader
from torchtitan.instruct_packing import POSITIONS, WINDOW_ROWS, join_rows, pack
from torchtitan.instruct_rows import DataRowError, FieldError, InstructRows
from torchtitan.instruct_split import ALL_ROWS, RowSplit
from torchtitan.instruct_turns import (
    EncodedRow,
    Formatter,
    Turn,
    encode_chat,
    encode_row,
    pad_id,
)
from torchtitan.tools.logging import logger

Sample = tuple[dict[str, torch.Tensor], torch.Tensor]


class InstructDataset(IterableDataset, Stateful):
    """Sequences of one data-parallel rank, in an order that a checkpoint can resume.

    An epoch is a pass over all rows of the split, in its order or in a permutation drawn from
    ``(shuffle_seed, epoch)``, the same on all ranks. Rank r of D takes every D-th row from r on; of
    W loader workers, worker w counts as rank r W + w of D W. The shares are cut to equal length, so
    that no rank runs dry before another: up to D - 1 (D W - 1) rows are left out of an epoch.

    A row none of whose answer tokens fits into ``seq_len`` is dropped, counted, and reported at the
    end of the epoch. An endless stream goes on to the next row. A finite one (``infinite=False``)
    finds these rows before it starts, by encoding all rows once: dropped on the way, they would
    make one rank's share shorter than another's.

    Iterating anew starts at the first row, unless ``load_state_dict`` was called since.

    Packed sequences are made of :data:`WINDOW_ROWS` rows of the share at a time, so ranks do not
    have equally many of them: packing is for endless streams.

    Args:
        rows: The data set.
        formatter: Row -> turns, or with a template row -> messages.
        tokenizer: See :func:`encode_row`, and with a template :func:`encode_chat`.
        seq_len: T, at least 1.
        dp_rank: Data-parallel rank, in [0, dp_world_size).
        dp_world_size: Number of data-parallel ranks, D.
        infinite: Go on with the next epoch after the last row.
        shuffle_seed: Seed of the permutations, at least 0; None keeps the order.
        section: Config section that messages name.
        split: Which rows to read.
        template: Makes a row's text of its messages; None takes turns as they are.
        packing: Put several rows into a sequence.

    Yields:
        ``({"input": int64 [T], "n_tokens": int64 []}, labels int64 [T])``; packed, the inputs have
        ``"positions"``, int64 [T], too: see :class:`PackedSequence`.

    Raises:
        ValueError: If an argument is out of range, there are fewer rows than ranks, or every row of
            an epoch is dropped.
        DataRowError: If the formatter or the template refuses a row.
    """

    def __init__(
        self,
        rows: InstructRows,
        formatter: Formatter | MessageReader,
        tokenizer: BaseTokenizer,
        seq_len: int,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        infinite: bool = True,
        shuffle_seed: int | None = None,
        section: str = "training",
        split: RowSplit = ALL_ROWS,
        template: ChatTemplate | None = None,
        packing: bool = False,
    ) -> None:
        if seq_len < 1:
            raise ValueError(f"{section}.seq_len is {seq_len}; it must be at least 1")
        if not 0 <= dp_rank < dp_world_size:
            raise ValueError(f"dp_rank is {dp_rank}; it must lie in [0, {dp_world_size})")
        if shuffle_seed is not None and shuffle_seed < 0:
            raise ValueError(f"shuffle_seed is {shuffle_seed}; it must be at least 0, or None")
        if packing and not infinite:
            raise ValueError(
                "packing is True and infinite is False; packing is for endless streams"
            )
        self._rows = rows
        self._formatter = formatter
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._dp_rank = dp_rank
        self._dp_world_size = dp_world_size
        self._infinite = infinite
        self._shuffle_seed = shuffle_seed
        self._seq_len_key = f"{section}.seq_len"
        self._split = split
        self._template = template
        self._packing = packing
        self._window = WINDOW_ROWS if packing else 1
        self._indices = split.indices(len(rows))
        self._fitting: np.ndarray | None = None
        # Where the stream is: rows of the windows behind it, then sequences of the window it is in.
        # And what rows of this epoch have met so far, those of the whole window included.
        self._epoch = 0
        self._position = 0
        self._in_window = 0
        self._dropped = 0
        self._shortened = 0
        self._resumed = False
        if template is None and tokenizer.eos_id is None:
            logger.warning(
                "The tokenizer has no end token (eos_token in tokenizer_config.json); "
                "the model will not learn where an answer ends"
            )

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

    def share(self, epoch: int, rank: int, world_size: int) -> np.ndarray:
        """Indices of the rows that ``rank`` reads in ``epoch``, int64, in order."""
        usable = self._indices if self._infinite else self._rows_that_fit()
        count = len(usable) // world_size
        if count == 0:
            raise ValueError(
                f"the data set has {len(usable)} usable rows, fewer than the {world_size} readers "
                "(data-parallel ranks times loader workers); use fewer ranks or more data"
            )
        if self._shuffle_seed is not None:
            # Seeded with both numbers: epochs then have unrelated orders, and none needs the last.
            usable = np.random.default_rng([self._shuffle_seed, epoch]).permutation(usable)
        return usable[: count * world_size][rank::world_size]

    def _rows_that_fit(self) -> np.ndarray:
        if self._fitting is None:
            fits = [self.encode(int(i)).has_target for i in self._indices]
            self._fitting = self._indices[np.array(fits, dtype=bool)]
            self._report_drops(len(fits) - len(self._fitting), 0, len(fits), "the data set")
        return self._fitting

    def __iter__(self) -> Iterator[Sample]:
        """Yield sequences, from the first or from where the loaded state was."""
        if not self._resumed:
            self._epoch = self._position = self._in_window = self._dropped = self._shortened = 0
        self._resumed = False
        worker = get_worker_info()
        workers, worker_id = (1, 0) if worker is None else (worker.num_workers, worker.id)
        rank, world_size = self._dp_rank * workers + worker_id, self._dp_world_size * workers
        while True:
            share = self.share(self._epoch, rank, world_size)
            while self._position < len(share):
                yield from self._rest_of_window(share)
            place = f"epoch {self._epoch} of rank {self._dp_rank}"
            self._report_drops(self._dropped, self._shortened, len(share), place)
            if not self._infinite:
                return
            self._epoch += 1
            self._position = self._dropped = self._shortened = 0

    def _rest_of_window(self, share: np.ndarray) -> Iterator[Sample]:
        """Yield what is left of the window at the stream's place, and leave the window behind."""
        window = share[self._position : self._position + self._window]
        rows = [self.encode(int(index)) for index in window]
        usable = [row for row in rows if row.has_target]
        if not self._in_window:
            self._shortened += sum(row.n_cut > 0 for row in rows)
            self._dropped += len(rows) - len(usable)
        samples = self._samples(usable)
        for number in range(self._in_window, len(samples)):
            # Counted before a sequence is handed out, since a checkpoint is taken after that.
            self._in_window = number + 1
            if self._in_window == len(samples):
                self._leave(window)
            yield samples[number]
        if not samples:
            self._leave(window)

    def _leave(self, window: np.ndarray) -> None:
        self._position += len(window)
        self._in_window = 0

    def _samples(self, rows: list[EncodedRow]) -> list[Sample]:
        """Return the sequences of a window's rows."""
        if not self._packing:
            return [
                ({"input": row.input_ids, "n_tokens": _count(row.n_tokens)}, row.labels)
                for row in rows
            ]
        samples = []
        for places in pack([row.n_tokens for row in rows], self._seq_len):
            packed = join_rows(
                [rows[place] for place in places], self._seq_len, pad_id(self._tokenizer)
            )
            inputs = {
                "input": packed.input_ids,
                "n_tokens": _count(packed.n_tokens),
                POSITIONS: packed.positions,
            }
            samples.append((inputs, packed.labels))
        return samples

    def _report_drops(self, dropped: int, shortened: int, seen: int, place: str) -> None:
        limit = f"{self._seq_len_key} = {self._seq_len}"
        if dropped == seen:
            raise ValueError(
                f"{place}: none of {seen} rows has an answer token within {limit}; raise "
                f"{self._seq_len_key}"
            )
        if dropped:
            logger.warning(
                f"{place}: {dropped} of {seen} rows dropped, because none of their answer lies "
                f"within {limit}; raise {self._seq_len_key} to keep them"
            )
        if shortened > dropped:
            logger.info(f"{place}: {shortened - dropped} of {seen} rows cut at {limit}")

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a position to mean the same row."""
        return {
            "rows": len(self._rows),
            "shuffle_seed": self._shuffle_seed,
            "dp_world_size": self._dp_world_size,
            "infinite": self._infinite,
            "validation_share": self._split.validation_share,
            "held_out": self._split.held_out,
            "packing": self._packed_as(),
        }

    def _packed_as(self) -> str | None:
        """What a window's sequences depend on besides its rows; None where a window is a row."""
        if not self._packing:
            return None
        template = "no template" if self._template is None else self._template.name
        return f"{self._seq_len} tokens, {template}"

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is; see :meth:`load_state_dict`."""
        return self._identity() | {
            "epoch": self._epoch,
            "position": self._position,
            "in_window": self._in_window,
            "dropped": self._dropped,
            "shortened": self._shortened,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration go on from ``state_dict``.

        Raises:
            ValueError: If the state belongs to another data set, order or number of ranks.
        """
        # Checkpoints from before rows could be held out or packed: they read all rows, one by one.
        before = {"validation_share": 0.0, "held_out": False, "packing": None, "in_window": 0}
        saved = before | state_dict
        for name, value in self._identity().items():
            if saved[name] != value:
                raise ValueError(
                    f"the checkpoint's data loader has {name} = {saved[name]!r}, this run has "
                    f"{value!r}; to start the data anew, add 'dataloader' to "
                    "checkpoint.exclude_from_loading"
                )
        self._epoch = saved["epoch"]
        self._position = saved["position"]
        self._in_window = saved["in_window"]
        self._dropped = saved["dropped"]
        self._shortened = saved["shortened"]
        self._resumed = True


def _count(n_tokens: int) -> torch.Tensor:
    return torch.tensor(n_tokens, dtype=torch.int64)
