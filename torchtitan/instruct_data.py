"""Batches of instruction data for fine-tuning, resumable to the row.

Only answers are learned (see ``torchtitan.instruct_turns``). A row is encoded on its own
while training, and padded to ``seq_len``; rows are not packed, so no answer sees another row.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset, get_worker_info

from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.instruct_rows import DataRowError, FieldError, InstructRows, read_rows
from torchtitan.instruct_split import ALL_ROWS, RowSplit
from torchtitan.instruct_turns import (
    INSTRUCT_DATASETS,
    EncodedRow,
    Formatter,
    Turn,
    encode_row,
    is_instruct_dataset,
)
from torchtitan.tools.logging import logger


class InstructDataset(IterableDataset, Stateful):
    """Encoded rows of one data-parallel rank, in an order that a checkpoint can resume.

    An epoch is a pass over all rows of the split, in its order or in a permutation drawn from
    ``(shuffle_seed, epoch)``, the same on all ranks. Rank r of D takes every D-th row from r on; of
    W loader workers, worker w counts as rank r W + w of D W. The shares are cut to equal length, so
    that no rank runs dry before another: up to D - 1 (D W - 1) rows are left out of an epoch.

    A row none of whose answer tokens fits into ``seq_len`` is dropped, counted, and reported at the
    end of the epoch. An endless stream goes on to the next row. A finite one (``infinite=False``)
    finds these rows before it starts, by encoding all rows once: dropped on the way, they would
    make one rank's share shorter than another's.

    Iterating anew starts at the first row, unless ``load_state_dict`` was called since.

    Args:
        rows: The data set.
        formatter: Row -> turns.
        tokenizer: See :func:`encode_row`.
        seq_len: T, at least 1.
        dp_rank: Data-parallel rank, in [0, dp_world_size).
        dp_world_size: Number of data-parallel ranks, D.
        infinite: Go on with the next epoch after the last row.
        shuffle_seed: Seed of the permutations, at least 0; None keeps the order.
        section: Config section that messages name.
        split: Which rows to read.

    Yields:
        ``({"input": int64 [T], "n_tokens": int64 []}, labels int64 [T])``

    Raises:
        ValueError: If an argument is out of range, there are fewer rows than ranks, or every row of
            an epoch is dropped.
        DataRowError: If the formatter refuses a row.
    """

    def __init__(
        self,
        rows: InstructRows,
        formatter: Formatter,
        tokenizer: BaseTokenizer,
        seq_len: int,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        infinite: bool = True,
        shuffle_seed: int | None = None,
        section: str = "training",
        split: RowSplit = ALL_ROWS,
    ) -> None:
        if seq_len < 1:
            raise ValueError(f"{section}.seq_len is {seq_len}; it must be at least 1")
        if not 0 <= dp_rank < dp_world_size:
            raise ValueError(f"dp_rank is {dp_rank}; it must lie in [0, {dp_world_size})")
        if shuffle_seed is not None and shuffle_seed < 0:
            raise ValueError(f"shuffle_seed is {shuffle_seed}; it must be at least 0, or None")
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
        self._indices = split.indices(len(rows))
        self._fitting: np.ndarray | None = None
        # Where the stream is, and what this epoch's rows have met so far.
        self._epoch = 0
        self._position = 0
        self._dropped = 0
        self._shortened = 0
        self._resumed = False
        if tokenizer.eos_id is None:
            logger.warning(
                "The tokenizer has no end token (eos_token in tokenizer_config.json); "
                "the model will not learn where an answer ends"
            )

    def turns(self, index: int) -> list[Turn]:
        """The turns of the row at ``index`` of the data set."""
        try:
            return self._formatter(self._rows[index])
        except FieldError as error:
            raise DataRowError(*self._rows.place(index), error.problem, error.field) from error

    def encode(self, index: int) -> EncodedRow:
        """The tokens of the row at ``index`` of the data set."""
        return encode_row(self.turns(index), self._tokenizer, self._seq_len)

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

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield encoded rows, from the first or from where the loaded state was."""
        if not self._resumed:
            self._epoch = self._position = self._dropped = self._shortened = 0
        self._resumed = False
        worker = get_worker_info()
        workers, worker_id = (1, 0) if worker is None else (worker.num_workers, worker.id)
        rank, world_size = self._dp_rank * workers + worker_id, self._dp_world_size * workers
        while True:
            share = self.share(self._epoch, rank, world_size)
            while self._position < len(share):
                row = self.encode(int(share[self._position]))
                # Counted before the row is handed out, since a checkpoint is taken after that.
                self._position += 1
                self._shortened += row.n_cut > 0
                if not row.has_target:
                    self._dropped += 1
                    continue
                n_tokens = torch.tensor(row.n_tokens, dtype=torch.int64)
                yield {"input": row.input_ids, "n_tokens": n_tokens}, row.labels
            place = f"epoch {self._epoch} of rank {self._dp_rank}"
            self._report_drops(self._dropped, self._shortened, len(share), place)
            if not self._infinite:
                return
            self._epoch += 1
            self._position = self._dropped = self._shortened = 0

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
        }

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is; see :meth:`load_state_dict`."""
        return self._identity() | {
            "epoch": self._epoch,
            "position": self._position,
            "dropped": self._dropped,
            "shortened": self._shortened,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration go on from ``state_dict``.

        Raises:
            ValueError: If the state belongs to another data set, order or number of ranks.
        """
        # Checkpoints from before rows could be held out lack the split: they read all rows.
        saved = {"validation_share": 0.0, "held_out": False} | state_dict
        for name, value in self._identity().items():
            if saved[name] != value:
                raise ValueError(
                    f"the checkpoint's data loader has {name} = {saved[name]!r}, this run has "
                    f"{value!r}; to start the data anew, add 'dataloader' to "
                    "checkpoint.exclude_from_loading"
                )
        self._epoch = state_dict["epoch"]
        self._position = state_dict["position"]
        self._dropped = state_dict["dropped"]
        self._shortened = state_dict["shortened"]
        self._resumed = True


def build_instruct_dataloader(
    *,
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    dataset: str,
    dataset_path: str | None,
    seq_len: int,
    batch_size: int,
    infinite: bool = True,
    shuffle_seed: int | None = None,
    section: str = "training",
    split: RowSplit = ALL_ROWS,
    **dataloader_kwargs: Any,
) -> ParallelAwareDataloader:
    """Build the loader of a data set of :data:`INSTRUCT_DATASETS`.

    Args:
        dp_world_size: Number of data-parallel ranks.
        dp_rank: This rank's number among them.
        tokenizer: See :func:`encode_row`.
        dataset: Name in :data:`INSTRUCT_DATASETS`, in any case.
        dataset_path: Local file or folder, or hub name; None takes the default hub name.
        seq_len: Tokens of a row, T.
        batch_size: Rows of a batch, B.
        infinite: Start over after the last row.
        shuffle_seed: See :class:`InstructDataset`.
        section: Config section that names the data set in errors.
        split: Which rows to read.
        **dataloader_kwargs: For ``StatefulDataLoader``. ``drop_last`` is True unless given: a
            pipeline schedule cannot run a batch of another size.

    Returns:
        ParallelAwareDataloader: Batches of ``({"input": [B, T], "n_tokens": [B]}, labels [B, T])``.

    Raises:
        ValueError: If the name is unknown, or the data gives no batch.
        FileNotFoundError: If a local path does not exist.
        DataRowError: If a row is broken. Local rows are all checked here, hub rows when read.
    """
    if not is_instruct_dataset(dataset):
        raise ValueError(f"unknown {section}.dataset {dataset!r}; known: {list(INSTRUCT_DATASETS)}")
    spec = INSTRUCT_DATASETS[dataset.lower()]
    rows = read_rows(dataset_path or spec.default_path, spec.fields, key=f"{section}.dataset_path")
    dataset_ = InstructDataset(
        rows=rows,
        formatter=spec.formatter,
        tokenizer=tokenizer,
        seq_len=seq_len,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        infinite=infinite,
        shuffle_seed=shuffle_seed,
        section=section,
        split=split,
    )
    for index in range(1 if rows.is_remote else len(rows)):
        dataset_.turns(index)  # better now than hours into a run
    dataloader_kwargs.setdefault("drop_last", True)
    if not infinite and dataloader_kwargs["drop_last"]:
        count = rows_of_a_reader(
            dataset_, dp_rank, dp_world_size, dataloader_kwargs.get("num_workers", 0)
        )
        require_a_batch(count, batch_size, section, split)
        if count % batch_size:
            logger.info(
                f"The last {count % batch_size} of a reader's {count} rows do not fill a batch of "
                f"{section}.local_batch_size = {batch_size} and are left out"
            )
    return ParallelAwareDataloader(
        dataset_,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        batch_size=batch_size,
        **dataloader_kwargs,
    )


def rows_of_a_reader(
    dataset: InstructDataset, dp_rank: int, dp_world_size: int, num_workers: int
) -> int:
    """Count the rows of an epoch that each loader worker of ``dp_rank`` reads; one without any."""
    workers = max(1, num_workers)
    return len(dataset.share(0, dp_rank * workers, dp_world_size * workers))


def require_a_batch(count: int, batch_size: int, section: str, split: RowSplit) -> None:
    """Refuse a reader's share that is smaller than a batch.

    Raises:
        ValueError: Naming the keys of ``section``.
    """
    if count >= batch_size:
        return
    more = "more data"
    if split.held_out:
        more = f"a larger data.validation_share (it is {split.validation_share})"
    raise ValueError(
        f"{section}.local_batch_size is {batch_size}, but a reader has only {count} rows; "
        f"lower it, or use fewer ranks, fewer workers or {more}"
    )
