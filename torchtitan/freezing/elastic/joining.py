"""Whether all ranks are ready for a move, before any of them gives its pipeline up."""

from __future__ import annotations

import json
import socket
from datetime import timedelta

import torch.distributed as dist

_VERDICT = "verdict"


class Joining:
    """A barrier before each move that ends without a rank that is late, for all ranks alike.

    A collective that times out leaves its process group broken, and ranks that disagree on whether
    it did. Here the first word in the store counts for everyone, also for a rank that comes later.

    Args:
        store: Reached by all processes, which build this together.
        rank: Of this process.
        n_ranks: Processes of the run.
        limit_s: How long a rank that is ready waits for the others, in seconds.
    """

    def __init__(self, store: dist.Store, rank: int, n_ranks: int, limit_s: float) -> None:
        self._store = dist.PrefixStore("timelyfreeze/moves", store)
        self._rank, self._n_ranks = rank, n_ranks
        self._limit = timedelta(seconds=limit_s)
        self._n_moves = 0
        self._store.set(_host(rank), socket.gethostname())  # a rank that is late tells nothing

    def absent(self) -> list[str]:
        """Wait for all ranks to call this; return those that did not in time, with their hosts.

        All ranks get the same. Where it is empty, all of them are ready and the move is on.
        """
        # A connection of its own: torch's watchdogs may use the other one meanwhile.
        store = self._store.clone()
        move = dist.PrefixStore(f"move/{self._n_moves}", store)
        self._n_moves += 1
        move.set(_ready(self._rank), "")
        if move.add("n_ready", 1) == self._n_ranks:
            _settle(move, [])
        try:
            move.wait([_VERDICT], self._limit)
        except dist.DistStoreError:
            ranks = range(self._n_ranks)
            _settle(move, [rank for rank in ranks if not move.check([_ready(rank)])])
        late = json.loads(move.get(_VERDICT))
        return [f"rank {rank} on host {store.get(_host(rank)).decode()}" for rank in late]


def _settle(move: dist.Store, late: list[int]) -> None:
    """Say who is late, unless it was said before."""
    move.compare_set(_VERDICT, "", json.dumps(late))


def _host(rank: int) -> str:
    return f"host/{rank}"


def _ready(rank: int) -> str:
    return f"ready/{rank}"
