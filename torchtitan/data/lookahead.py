"""A loader whose next batch can be looked at before its turn."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from torchtitan.data.loader import ResizableDataloader

Batch = tuple[dict[str, Tensor], Tensor]


class _Held(NamedTuple):
    """A batch that was looked at; None where there are no more. And the loader's state before."""

    state: dict[str, Any]
    batch: Batch | None


class Lookahead:
    """The batches of a loader; what it saves counts those that were handed out.

    Args:
        loader: Where batches come from.
    """

    def __init__(self, loader: ResizableDataloader) -> None:
        self._loader = loader
        self._batches: Iterator[Batch] = iter(())
        self._held: _Held | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Begin where the loader is; only one iterator is there at a time."""
        self._batches = iter(self._loader)
        return self

    def __next__(self) -> Batch:
        """Return the next batch.

        Raises:
            StopIteration: If there is none.
        """
        held, self._held = self._held, None
        if held is None:
            return next(self._batches)
        if held.batch is None:
            raise StopIteration
        return held.batch

    def peek(self) -> Batch | None:
        """Return the batch that comes next, which stays there; None if there is none."""
        if self._held is None:
            state = self._loader.state_dict()
            self._held = _Held(state, next(self._batches, None))
        return self._held.batch

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state before the batch that comes next."""
        return self._loader.state_dict() if self._held is None else self._held.state

    def state_to_load(self, keys: Collection[str]) -> dict[str, Any]:
        """Return what to load of a checkpoint that has ``keys`` of the loader."""
        return self._loader.state_to_load(keys)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what was saved; raises as the loader does."""
        self._loader.load_state_dict(state_dict)
