"""Messages that are received ahead: in their order, and no more than there is room for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from timelyfreeze.runtime.entering.ahead import Inlet


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
    inlet = Inlet(sender.receive, room)
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
    inlet = Inlet(sender.receive, 1)
    inlet.expect(2)
    received_at_wait: list[int] = []
    real = inlet._arriving[0]
    inlet._arriving[0] = (
        real[0],
        SimpleNamespace(wait=lambda: received_at_wait.append(sender.n_received)),
    )
    inlet.take()
    assert received_at_wait == [2]
