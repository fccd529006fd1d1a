"""A data loader whose place any number of data-parallel ranks, and of workers, can go on from."""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.tools.logging import logger

from torchtitan.data.dataset import InstructDataset

RANK_KEY = "dp_rank_"


class ResizableDataloader(ParallelAwareDataloader):
    """Upstream's loader, which saves what upstream's saves but can load what other ranks saved.

    Each rank saves its own state; upstream's loads no other. Here all are loaded: where there are
    as many readers as before, each goes on from its own, otherwise all from what is left over.
    """

    dataset: InstructDataset

    def state_to_load(self, keys: Collection[str]) -> dict[str, Any]:
        """Return what to load of a checkpoint that has ``keys``: the states of all ranks."""
        ranks = [key for key in keys if key.startswith(RANK_KEY)]
        return {**dict.fromkeys(ranks or [self._rank_id], b""), "world_size": 0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the states of all ranks.

        Raises:
            ValueError: If a rank's state is missing, or they belong to other data.
        """
        if not state_dict:  # nothing was read yet
            return
        dp_degree = state_dict["world_size"]
        if dp_degree == self.dp_world_size and self._rank_id in state_dict:
            own = _plain(state_dict[self._rank_id])
            workers = list(_dataset_states(own))
            if len(workers) == max(1, self.num_workers) and self.dataset.continues(
                workers, dp_degree * len(workers)
            ):
                StatefulDataLoader.load_state_dict(self, own)
                return
        names = [f"{RANK_KEY}{rank}" for rank in range(dp_degree)]
        if missing := [name for name in names if name not in state_dict]:
            raise ValueError(
                f"the checkpoint's data loader has world_size = {dp_degree}, but not "
                f"{', '.join(missing)}; to start the data anew, add 'dataloader' to "
                "checkpoint.exclude_from_loading"
            )
        readers = [state for name in names for state in _dataset_states(_plain(state_dict[name]))]
        self.dataset.go_on(self.dataset.remaining(readers))
        logger.info(
            "The data goes on with %d data-parallel ranks where %d have stopped, from the first "
            "example that none of them has read",
            self.dp_world_size,
            dp_degree,
        )


class _PlainUnpickler(pickle.Unpickler):
    """Reads values that need no code: numbers, texts, lists, dicts."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(
            f"the checkpoint's data loader names {module}.{name}; its state must be plain values"
        )


def _plain(pickled: bytes) -> dict[str, Any]:
    state: dict[str, Any] = _PlainUnpickler(io.BytesIO(pickled)).load()
    return state


def _dataset_states(state: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the state of a rank's data set as each of its workers has it, or it alone.

    They stand where torchdata's loader puts them.
    """
    if "_snapshot" not in state:
        yield state["dataset_state"]
        return
    if state["_steps_since_snapshot"]:
        raise ValueError(
            "the checkpoint's data loader was not saved at every step; resume with as many "
            "data-parallel ranks, or, to start the data anew, add 'dataloader' to "
            "checkpoint.exclude_from_loading"
        )
    workers = state["_snapshot"]["_worker_snapshots"]
    for number in range(len(workers)):
        yield workers[f"worker_{number}"]["dataset_state"]
