"""A front that works ahead: what it forwards when, and what the first live stage gets.

Messages go through boxes of this process. Waiting for what nobody has sent, or has room for, is an
error: so each test shows that nobody has to wait.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from timelyfreeze.runtime.entering import ahead as ahead_module
from timelyfreeze.runtime.entering.ahead import FrontRunAhead, Microbatches, Receiver
from timelyfreeze.runtime.entering.stage import BlockPlace

N_STAGES, N_MICROBATCHES = 3, 4
SHAPE = (2, 5)


class Blocked(Exception):
    """Somebody would wait."""


class Message:
    def __init__(self) -> None:
        self.is_done = False

    def wait(self) -> None:
        if not self.is_done:
            raise Blocked


class Boxes:
    """Stands in for ``torch.distributed``: a message leaves once there is room for it."""

    def __init__(self) -> None:
        self.rank = 0
        self.sent: dict[Any, deque[Any]] = defaultdict(deque)
        self.rooms: dict[Any, deque[Any]] = defaultdict(deque)

    def isend(self, tensor: Tensor, to: int, group: Any) -> Message:
        return self._meet((self.rank, to), self.sent, tensor)

    def irecv(self, tensor: Tensor, source: int, group: Any) -> Message:
        return self._meet((source, self.rank), self.rooms, tensor)

    def _meet(self, way: Any, mine: dict[Any, deque[Any]], tensor: Tensor) -> Message:
        message = Message()
        mine[way].append((tensor, message))
        while self.sent[way] and self.rooms[way]:
            (data, one), (room, other) = self.sent[way].popleft(), self.rooms[way].popleft()
            room.copy_(data)
            one.is_done = other.is_done = True
        return message

    def get_global_rank(self, group: Any, rank: int) -> int:
        return rank


class Ranks:
    """A front of one stage, the first live one, and one behind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.boxes = Boxes()
        monkeypatch.setattr(ahead_module, "dist", self.boxes)
        self.forwarded: list[float] = []
        self.ranks = [FrontRunAhead(self._stage(i), N_MICROBATCHES, Any) for i in range(N_STAGES)]  # type: ignore[arg-type]

    def _stage(self, index: int) -> Any:
        def forward_alone(tokens: Tensor) -> Tensor:
            self.forwarded.append(float(tokens))
            return tokens.expand(SHAPE) + 0.5

        info = SimpleNamespace(buffer=None, tensor_meta=torch.empty(SHAPE, device="meta"))
        return SimpleNamespace(
            stage_index=index, num_stages=N_STAGES, is_first=index == 0, device="cpu",
            args_recv_info={0: (info,)}, forward_alone=forward_alone,
        )  # fmt: skip

    def on(self, rank: int) -> FrontRunAhead:
        self.boxes.rank = rank
        return self.ranks[rank]

    def begin_step(self, n_front: int) -> None:
        for rank in range(N_STAGES):
            self.on(rank).begin_step(n_front)

    def begin_batch(self, first: int, *, is_followed: bool) -> None:
        """The front comes last: all others have room for what it sends."""
        for rank in reversed(range(N_STAGES)):
            self.on(rank).begin_batch(batch(first), is_followed=is_followed)

    def taken(self) -> list[float]:
        entry = self.on(1).entry(0)
        assert entry is not None
        return [float(entry.inputs[m][0, 0]) for m in range(N_MICROBATCHES)]

    def run_first_batch(self) -> None:
        self.begin_step(1)
        self.begin_batch(0, is_followed=False)
        assert [self.on(rank).entry(0) for rank in range(N_STAGES)] == [None] * N_STAGES
        for rank in range(N_STAGES):
            self.on(rank).end_batch()
        assert self.forwarded == [], "the first batch runs as ever"


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    ranks = Ranks(monkeypatch)
    ranks.run_first_batch()
    return ranks


def batch(first: int) -> Callable[[], Microbatches]:
    """Microbatches first, first + 1, ..."""
    numbers = range(first, first + N_MICROBATCHES)
    return lambda: [((torch.tensor(float(number)),), {}) for number in numbers]


def never() -> Microbatches:
    raise AssertionError("this batch has been forwarded")


def test_the_front_forwards_the_next_step_before_live_stages_end_this_one(ranks: Ranks) -> None:
    ranks.begin_step(1)
    ranks.begin_batch(10, is_followed=True)
    assert ranks.taken() == [10.5, 11.5, 12.5, 13.5]
    ranks.on(0).end_batch(batch(20))
    assert ranks.forwarded == [10, 11, 12, 13, 20, 21, 22, 23]
    for rank in (1, 2):
        ranks.on(rank).end_batch(never)
    ranks.begin_step(1)
    for rank in range(N_STAGES):
        ranks.on(rank).begin_batch(never, is_followed=False)
    assert ranks.taken() == [20.5, 21.5, 22.5, 23.5]
    for rank in range(N_STAGES):
        ranks.on(rank).end_batch()
    assert len(ranks.forwarded) == 2 * N_MICROBATCHES, "nobody has said that another one follows"


def test_every_stage_knows_where_the_batch_begins(ranks: Ranks) -> None:
    ranks.begin_step(1)
    for rank in range(N_STAGES):
        entry = ranks.on(rank).entry(0)
        assert entry is not None
        assert entry.start == BlockPlace(1, 0)
    ranks.begin_step(0)
    assert ranks.on(0).entry(0) is None


def test_the_front_waits_for_room_one_batch_ahead(ranks: Ranks) -> None:
    """Live stages have forwarded nothing of the first batch: the second has no room yet."""
    ranks.begin_step(1)
    ranks.begin_batch(10, is_followed=True)
    assert len(ranks.forwarded) == N_MICROBATCHES
    ranks.on(0).end_batch()
    with pytest.raises(Blocked):
        ranks.on(0).begin_batch(batch(20), is_followed=False)
    # One is being sent, and one was forwarded meanwhile.
    assert len(ranks.forwarded) == N_MICROBATCHES + 2


def test_batches_of_one_step_follow_each_other(ranks: Ranks) -> None:
    ranks.begin_step(1)
    ranks.begin_batch(10, is_followed=True)
    ranks.taken()
    for rank in range(N_STAGES):
        ranks.on(rank).end_batch()
    ranks.begin_batch(20, is_followed=False)
    assert ranks.taken() == [20.5, 21.5, 22.5, 23.5]


def test_where_all_is_frozen_no_batch_can_begin_behind(ranks: Ranks) -> None:
    ranks.begin_step(N_STAGES)
    assert ranks.on(0).n_front == 0
    assert ranks.on(0).entry(0) is None


def test_microbatches_are_taken_in_their_order(ranks: Ranks) -> None:
    ranks.begin_step(1)
    ranks.begin_batch(10, is_followed=False)
    entry = ranks.on(1).entry(0)
    assert entry is not None
    _ = entry.inputs[0]
    assert float(entry.inputs[0][0, 0]) == 10.5
    assert float(entry.inputs[0][0, 0]) == 10.5
    with pytest.raises(AssertionError, match="in their order"):
        _ = entry.inputs[2]


class Sender:
    """Messages are 0, 1, ...; one is there as soon as it is waited for."""

    def __init__(self) -> None:
        self.n_received = 0
        self.waited: list[int] = []

    def receive(self) -> Any:
        number, self.n_received = self.n_received, self.n_received + 1
        return torch.tensor(number), SimpleNamespace(wait=lambda: self.waited.append(number))


@pytest.mark.parametrize("room", [1, 2, 3, 7])
def test_messages_come_in_order_and_no_more_than_there_is_room_for(room: int) -> None:
    sender = Sender()
    inlet = Receiver(sender.receive, room)
    assert sender.n_received == 0
    inlet.expect(4)
    inlet.expect(1)
    for number in range(5):
        assert sender.n_received == min(number + room, 5)
        assert int(inlet.take()) == number
        assert sender.waited[-1] == number
    assert sender.n_received == 5, "nothing is received that is not expected"


def test_there_is_room_for_the_next_message_before_one_is_waited_for() -> None:
    """Else whoever sends both, one after the other, and the receiver would take turns."""
    sender = Sender()
    inlet = Receiver(sender.receive, 1)
    inlet.expect(2)
    received_at_wait: list[int] = []
    real = inlet._arriving[0]
    inlet._arriving[0] = (
        real[0],
        SimpleNamespace(wait=lambda: received_at_wait.append(sender.n_received)),
    )
    inlet.take()
    assert received_at_wait == [2]
