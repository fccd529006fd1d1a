"""The cache for a trainer of one's own: checked, opened, identified."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import index
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from timelyfreeze.files import write_obstacle
from timelyfreeze.front.caching.folder import Row, folder_for
from timelyfreeze.front.caching.store import ActivationStore
from timelyfreeze.policies import FreezePolicy
from timelyfreeze.runtime import FreezingStage
from timelyfreeze.settings import GIB, ActivationCache


def cache_errors(
    cache: ActivationCache, method: str | FreezePolicy, *, plans: bool
) -> Iterator[str]:
    """Yield why outputs of a frozen front cannot be kept, or not as asked."""
    yield from cache.errors()
    if plans:
        yield (
            f"cache is given, and method is {method!r}, whose plan freezes other tensors in each "
            "microbatch; it must be a policy without a plan"
        )
    obstacle = write_obstacle(Path(cache.folder)) if cache.disk_gib > 0.0 and cache.folder else None
    if obstacle:
        yield f"cache.folder is {cache.folder!r}, and {obstacle}; name another folder"


@contextmanager
def opened(cache: ActivationCache | None) -> Iterator[ActivationStore | None]:
    """Open this process's store, and close it if its use fails."""
    if cache is None:
        yield None
        return
    folder = folder_for(Path(cache.folder), dist.get_rank(), cache.disk_gib)
    store = ActivationStore(int(cache.memory_gib * GIB), folder)
    try:
        yield store
    except BaseException:
        store.close()
        raise


def front_identity(cache: ActivationCache | None, device: torch.device) -> str:
    """Return the influences on a front's output besides its weights and a row's tokens."""
    named = "" if cache is None else cache.identity
    return repr((named, torch.get_default_dtype(), torch.__version__, device.type))


_HOW = "freezer.step(t, rows=[[Row(number, token_digest(tokens)), ...], ...])"


class NamedRows:
    """Checks the rows named for a step. All ranks find the same mistakes."""

    def __init__(self, stages: Sequence[FreezingStage], n_microbatches: int) -> None:
        self._stages = stages
        self._n_microbatches = n_microbatches
        self._step = 0
        self._n_run = 0
        self.batches: list[list[Row]] = []  # the rows of each of the step's batches

    def begin_step(self, step: int, rows: Sequence[Sequence[Row]] | None) -> None:
        """Take the rows of a step."""
        if rows is None:
            raise ValueError(f"step {step} has no rows, which the cache needs: {_HOW}")
        self._step, self._n_run = step, 0
        self.batches = [
            [_row(row, f"rows[{number}][{place}]") for place, row in enumerate(batch)]
            for number, batch in enumerate(rows)
        ]
        for number in range(len(self.batches)):
            self._check_number(number)

    @contextmanager
    def one_batch(self) -> Iterator[None]:
        """Run a batch of the step."""
        self._n_run += 1
        self._check_count(self._n_run <= len(self.batches))
        yield
        self._check_number(self._n_run - 1)

    def end_step(self) -> None:
        """Leave the step."""
        self._check_count(self._n_run == len(self.batches))

    def _check_count(self, is_right: bool) -> None:
        if not is_right:
            raise ValueError(
                f"step {self._step} runs {self._n_run} batches, and its rows are those of "
                f"{len(self.batches)}; name the rows of each: {_HOW}"
            )

    def _check_number(self, number: int) -> None:
        """Compare the number of rows with earlier batches, all of equal size."""
        named = len(self.batches[number])
        sizes = {stage.n_rows for stage in self._stages if stage.n_rows is not None}
        for wanted in (size * self._n_microbatches for size in sizes):
            if named != wanted:
                raise ValueError(
                    f"rows[{number}] of step {self._step} are {named}, and a batch has {wanted}; "
                    "name each row of it, in their order"
                )


def _row(row: Any, name: str) -> Row:
    """Return a row with a plain number."""
    try:
        checked = Row(index(row.number), row.digest)
    except (AttributeError, TypeError):
        checked = Row(-1, "")
    if checked.number < 0 or not isinstance(checked.digest, str):
        raise ValueError(
            f"{name} is {row!r}; it must be a Row with a number of 0 or more and a digest, a text"
        )
    return checked
