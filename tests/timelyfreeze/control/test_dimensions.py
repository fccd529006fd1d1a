"""The first estimate of ranks, against the formula of the estimate by hand."""

import math
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.timelyfreeze.helpers.stages import process_group
from timelyfreeze.control.dimensions import times_of_dimensions, with_rank
from timelyfreeze.settings import FreezeSettings
from timelyfreeze.timing import Energies

# Of two processes: energy inside and in all, inner products inside and in all.
FEW = Energies(30.0, 100.0, 5.0, 10.0), Energies(10.0, 60.0, 3.0, 10.0)
MANY = Energies(60.0, 100.0, 9.0, 10.0), Energies(36.0, 60.0, 9.0, 10.0)
ENERGIES = [{16: few, 64: many} for few, many in zip(FEW, MANY, strict=True)]


def by_hand(captured: float, mean: float, cost: float) -> float:
    steps = math.sqrt(1.0 - 0.5 * (1.0 - captured)) / (1.0 - 0.5 * (1.0 - mean))
    return (1.0 - 0.5 * (1.0 - cost) / 3.0) * max(steps, 1.0)


def test_more_directions_cost_more_and_need_fewer_steps() -> None:
    shares = [(1000.0, 200_000.0), (600.0, 120_000.0)]  # rank 1 costs 1 / 200
    times = times_of_dimensions(ENERGIES, shares)
    assert times == pytest.approx(
        {16: by_hand(40 / 160, 0.4, 16 / 200), 64: by_hand(96 / 160, 0.9, 64 / 200)}
    )
    assert times[64] < times[16]
    narrow = times_of_dimensions(ENERGIES, [(1000.0, 64_000.0), (600.0, 38_400.0)])
    assert narrow[64] == pytest.approx(by_hand(0.6, 0.9, 1.0)), "nothing is saved"


@pytest.mark.parametrize("inside", [-1.0, 11.0, math.nan])
def test_nothing_is_said_where_noise_prevails(inside: float) -> None:
    noise = {16: Energies(1.0, 2.0, inside, 10.0), 64: MANY[0]}
    assert times_of_dimensions([noise], [(1.0, 200.0)]) == {}
    assert times_of_dimensions([{16: Energies(), 64: Energies()}], [(0.0, 0.0)]) == {}


class Blocks(nn.Module):
    """Blocks of a linear layer each, without memory, beside an embedding and other weights."""

    def __init__(self, width: int, n: int = 3, *, others: int = 0) -> None:
        super().__init__()
        with torch.device("meta"):
            self.embedding = nn.Embedding(100_000, width)
            self.layers = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(n))
            self.others = nn.Parameter(torch.empty(others))


def rank_of(*modules: nn.Module, others: Sequence[Any] = (), **settings: Any) -> Any:
    """What "auto" gives for these stages, beside processes with ``others``."""
    exchange = SimpleNamespace(all_gather=lambda mine: [mine, *others])
    stages = [SimpleNamespace(submod=module) for module in modules]
    wanted = with_rank(FreezeSettings(**settings), stages, exchange)  # type: ignore[arg-type]
    return wanted.gradient_rank


def test_auto_gives_ranks_to_wide_models_of_linear_layers() -> None:
    assert rank_of(Blocks(512)) == [16, 32, 64]
    assert rank_of(Blocks(512), last_warmup_step=2) == 32
    assert rank_of(Blocks(511)) == 0
    assert rank_of(Blocks(511, 2), Blocks(512)) == [16, 32, 64], "most layers decide"
    assert rank_of(Blocks(512, 2), Blocks(511)) == 0
    assert rank_of(Blocks(512), gradient_rank=8) == 8
    assert rank_of(nn.Module()) == 0


def test_auto_is_zero_where_most_weights_are_in_no_linear_layer() -> None:
    held = 3 * 4 * 512 * 512
    biases = 3 * 4 * 512
    assert rank_of(Blocks(512, others=held - biases)) == [16, 32, 64]
    assert rank_of(Blocks(512, others=held + 1)) == 0
    elsewhere = [((Counter({256: 9}), 1, 2 * held),)]
    assert rank_of(Blocks(512), others=elsewhere) == 0


def test_auto_counts_what_learns_and_is_computed_whole() -> None:
    untrained = Blocks(512).requires_grad_(False)
    untrained.layers.append(nn.Linear(8, 8))
    assert rank_of(untrained) == 0
    compiled = Blocks(512)
    compiled.layers[1].compile()
    assert rank_of(compiled) == 0
    with process_group("fake", world_size=2):
        mesh = init_device_mesh("cpu", (2,))
        assert rank_of(fully_shard(Blocks(512), mesh=mesh)) == [16, 32, 64]
        parallel = parallelize_module(Blocks(512), mesh, {"layers.*": ColwiseParallel()})
        assert rank_of(parallel) == 0
