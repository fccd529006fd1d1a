"""A checkpoint in memory, saved and read by one process; several are in runs/test_elastic.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from torchtitan.checkpoints.handover import MemoryCheckpoint

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def state() -> dict[str, Any]:
    return {
        "weight": torch.arange(6.0).reshape(2, 3),
        "rounded": torch.tensor([1.0, 2.5], dtype=torch.bfloat16),
        "step": torch.tensor(7.0),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "text": "where the data is",
        "counts": {"tokens": 12},
    }


def saved(of: dict[str, Any]) -> MemoryCheckpoint:
    memory = MemoryCheckpoint(CPU)
    memory.metadata = dcp.save(of, storage_writer=memory)
    return memory


def test_what_is_read_is_what_was_saved() -> None:
    memory = saved(state())
    found = {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for key, value in state().items()
    }
    found["counts"] = {"tokens": 0}
    dcp.load(found, storage_reader=memory)
    for key, value in state().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value)
            assert found[key].dtype is value.dtype
        else:
            assert found[key] == value


def test_it_is_a_copy() -> None:
    mine = state()
    memory = saved(mine)
    mine["weight"].zero_()
    found = {"weight": torch.zeros(2, 3)}
    dcp.load(found, storage_reader=memory)
    assert torch.equal(found["weight"], state()["weight"])


def test_it_says_what_it_holds() -> None:
    memory = saved(state())
    held = memory.read_metadata().state_dict_metadata
    assert set(held) == {"weight", "rounded", "step", "turned", "text", "counts.tokens"}


def test_what_was_not_saved_is_missed_by_name() -> None:
    with pytest.raises(dcp.CheckpointException, match="bias"):
        dcp.load({"bias": torch.zeros(2)}, storage_reader=saved(state()))
