"""Messages from a frozen front, received before they are needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

# Room for one message, and what tells when it is there.
Arrival = tuple[Tensor, dist.Work]


class Inlet:
    """Receives a sequence of messages, a few of them ahead of whoever takes them.

    The sender of a message waits until there is room for it. So the room is how far the sender can
    be ahead.

    Args:
        receive: Begins to receive the next message.
        room: How many messages are received ahead, 1 or more.
    """

    def __init__(self, receive: Callable[[], Arrival], room: int) -> None:
        self._receive = receive
        self._room = room
        self._awaited = 0
        self._arriving: deque[Arrival] = deque()

    def expect(self, n_messages: int) -> None:
        """Say that so many messages more will come."""
        self._awaited += n_messages
        self._fill()

    def take(self) -> Tensor:
        """Return the next message; wait for it if it is not there yet."""
        message, work = self._arriving.popleft()
        self._fill()
        work.wait()
        return message

    def _fill(self) -> None:
        while self._awaited and len(self._arriving) < self._room:
            self._arriving.append(self._receive())
            self._awaited -= 1
