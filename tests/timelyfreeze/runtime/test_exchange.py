"""The processes that freeze the same, from the groups that a trainer names."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from tests.timelyfreeze.helpers.stages import process_group
from timelyfreeze.runtime.exchange import Exchange, GridExchange, exchange_of


@pytest.fixture(autouse=True)
def _two_ranks() -> Iterator[None]:
    with process_group("fake", world_size=2):
        yield


def stage_of(n_processes: int | None) -> SimpleNamespace:
    """A stage whose weight lies on a mesh of so many processes, or on none."""
    layer = nn.Linear(2, 2, bias=False)
    if n_processes is not None:
        mesh = init_device_mesh("cpu", (2 // n_processes, n_processes), mesh_dim_names=("a", "b"))
        layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh["b"], [Replicate()]))
    return SimpleNamespace(submod=layer, group=dist.group.WORLD)


def test_without_groups_all_processes_freeze_the_same() -> None:
    found = exchange_of([stage_of(2)], None, None)
    assert (type(found), found.size) == (Exchange, 2)


@pytest.mark.parametrize("n_processes", [None, 1])
def test_a_pipeline_alone_freezes_the_same_unless_it_shares_its_tensors(
    n_processes: int | None,
) -> None:
    alone = dist.new_group([0])
    found = exchange_of([stage_of(n_processes)], alone, None)
    assert (type(found), found.size) == (Exchange, 1)
    with pytest.raises(ValueError, match="parameters are split between processes"):
        exchange_of([stage_of(n_processes), stage_of(2)], alone, None)


def test_replicas_are_as_many_pipelines() -> None:
    found = exchange_of([stage_of(2)], None, dist.new_group([0]))
    assert (type(found), found.size) == (GridExchange, 2)
