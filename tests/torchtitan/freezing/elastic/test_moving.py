"""The time of a move, which counts for the devices."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from torchtitan.freezing.elastic.moving import MovingRun


class Stays(MovingRun):
    """A run whose one move has been made; it keeps what has arrived."""

    def next_trainer(self) -> None:
        return None

    def arrive(self, step: int, seconds: float) -> None:
        self.arrived = step, seconds


def test_the_seconds_of_a_move_are_those_of_every_device_and_count_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torchtitan.freezing.elastic.moving.time.perf_counter", lambda: 12.5)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    run = Stays(lambda *_: None)
    trainer: Any = SimpleNamespace(step=6, device_seconds=100.0)
    run.trainer, run._left_at = trainer, 10.0
    for _ in range(2):
        run.begin()
        assert run.arrived == (7, 2.5)
        assert trainer.device_seconds == 100.0 + 4 * 2.5
