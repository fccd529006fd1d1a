"""Ranks as threads that share a store in memory."""

import socket
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from torchtitan.freezing.elastic.run import MoveBarrier

LONG_S, SHORT_S = 60.0, 0.2


def ranks(n: int, limit_s: float) -> list[MoveBarrier]:
    store = dist.HashStore()
    return [MoveBarrier(store, rank, n, limit_s) for rank in range(n)]


def asked(ranks: list[MoveBarrier]) -> list[list[str]]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(MoveBarrier.absent, ranks))


def named(*ranks: int) -> list[str]:
    return [f"rank {rank} on host {socket.gethostname()}" for rank in ranks]


def test_where_all_are_ready_nobody_is_absent() -> None:
    for joining in (ranks(4, LONG_S), ranks(1, LONG_S)):
        for _ in range(3):
            assert asked(joining) == [[]] * len(joining)


def test_all_are_told_who_was_late_and_so_are_the_late_ones() -> None:
    joining = ranks(4, SHORT_S)
    in_time, late = joining[1:3], [joining[3], joining[0]]
    assert asked(in_time) == [named(0, 3)] * 2
    # The last of them finds that by now all have come.
    assert [one.absent() for one in late] == [named(0, 3)] * 2


def test_the_next_move_begins_anew() -> None:
    joining = ranks(2, SHORT_S)
    assert joining[0].absent() == named(1)
    assert joining[1].absent() == named(1)
    for one in joining:
        one._limit = 100 * one._limit
    assert asked(joining) == [[], []]


def test_who_comes_as_the_time_is_up_is_late_for_all_or_for_nobody() -> None:
    """Every rank gives up at once, as soon as it waits."""
    for _ in range(20):
        joining = ranks(4, 1e-3)
        first, *others = asked(joining)
        assert others == [first] * 3
