"""Metrics of sharded tensors are those of the whole tensor, and the state is sharded alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.timelyfreeze.helpers.changes import (
    DECAY,
    EVERY,
    THRESHOLD,
    Metrics,
    assert_close,
    oracle,
)
from tests.timelyfreeze.helpers.stages import process_group
from timelyfreeze.policies.policy import Measurement, Source
from timelyfreeze.runtime.meters.change_meter import ChangeMeter


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("source", Source)
def test_under_fsdp_the_state_is_sharded_as_the_parameters_are(source: Source) -> None:
    torch.manual_seed(0)
    with process_group():
        module = nn.Linear(3, 2)
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        named = list(module.named_parameters())
        meter = ChangeMeter(named, Measurement(source, EVERY, DECAY, THRESHOLD))
        meter.begin()
        changes, measured = [], []
        for n_steps in (2, 1, 1):
            start = [p.full_tensor().detach().double() for _, p in named]
            sums = [torch.zeros_like(weight) for weight in start]
            for _ in range(n_steps):
                module.zero_grad()
                module(torch.randn(4, 3)).square().sum().backward()
                last = [p.grad.full_tensor().double() for _, p in named]
                sums = [a + b for a, b in zip(sums, last, strict=True)]
                with torch.no_grad():
                    for _, p in named:
                        p.mul_(1.25)
                meter.add_step(np.ones(len(named)))
            ends = [p.full_tensor().detach().double() for _, p in named]
            moves = [end - begin for end, begin in zip(ends, start, strict=True)]
            changes.append(
                {Source.UPDATES: moves, Source.GRADIENTS: sums, Source.LAST_GRADIENT: last}[source]
            )
            measured.append(meter.take())
        for got, wanted in zip(measured, oracle(changes, settles=True), strict=True):
            assert_close(got, wanted)
        state = meter.state_dict()
        for i, (name, p) in enumerate(named):
            for kind in ("previous", "mean"):
                kept = state[f"{kind}.{name}"]
                assert isinstance(kept, DTensor)
                assert (kept.placements, kept.shape) == (p.placements, p.shape)
            previous = state[f"previous.{name}"].full_tensor()
            assert torch.allclose(previous.double(), changes[-1][i], rtol=1e-6)
        restored = ChangeMeter(named, Measurement(source, EVERY, DECAY, THRESHOLD))
        restored.load_state_dict({key: tensor.clone() for key, tensor in state.items()})
        for each in (meter, restored):
            each.add_step(np.ones(len(named)))
        assert restored.take() == meter.take()


def on_ranks(n_ranks: int, what: Callable[[], Any]) -> list[Any]:
    """What each of several ranks returns, which are threads of this process."""
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    store = dist.HashStore()

    def run(rank: int) -> Any:
        dist.init_process_group("threaded", rank=rank, world_size=n_ranks, store=store)
        try:
            return what()
        except BaseException as error:
            threaded.ProcessLocalGroup.exception_handle(error)  # or the others wait for this one
            raise
        finally:
            dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        with ThreadPoolExecutor(n_ranks) as pool:
            futures = [pool.submit(run, rank) for rank in range(n_ranks)]
        for error in [future.exception() for future in futures]:
            if error is not None and not isinstance(error, SystemExit):  # others were told to end
                raise error
        return [future.result() for future in futures]
    finally:
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)


def whole_tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def scaled(tensors: Sequence[Tensor], factor: float) -> list[Tensor]:
    return [factor * tensor.double() for tensor in tensors]


@pytest.mark.parametrize("source", Source)
def test_shards_of_unequal_size_add_up_to_the_tensor(source: Source) -> None:
    # Two ranks have three and two rows, one and none; the third has the same on both.
    whole = whole_tensors((5, 3), (1, 4), (6,))

    def measure() -> tuple[list[int], list[Metrics]]:
        mesh = init_device_mesh("cpu", (2,))
        placements = (Shard(0), Shard(0), Replicate())
        parameters = [
            nn.Parameter(distribute_tensor(tensor.clone(), mesh, [placement]))
            for tensor, placement in zip(whole, placements, strict=True)
        ]
        named = [(f"w{i}", parameter) for i, parameter in enumerate(parameters)]
        meter = ChangeMeter(named, Measurement(source, EVERY, DECAY, THRESHOLD))
        meter.begin()
        found = []
        for factor in (2.0, 0.5):
            with torch.no_grad():
                for parameter in parameters:
                    parameter.mul_(factor)
            for parameter, tensor in zip(parameters[:2], whole[:2], strict=True):
                gradient = distribute_tensor(factor * tensor, mesh, parameter.placements)
                parameter.grad = gradient
            # Each rank has a part of the sum, as tensor parallelism may leave it.
            part = (0.25, 0.75)[dist.get_rank()] * factor * whole[2]
            parameters[2].grad = DTensor.from_local(part, mesh, [Partial()])
            meter.add_step(np.ones(3))
            found.append(meter.take())
        return [parameter.to_local().numel() for parameter in parameters], found

    if source is Source.UPDATES:
        changes = [scaled(whole, 1.0), scaled(whole, -1.0)]
    else:
        changes = [scaled(whole, 2.0), scaled(whole, 0.5)]
    (here, first), (there, second) = on_ranks(2, measure)
    assert (here, there) == ([9, 4, 6], [6, 0, 6])
    assert first == second
    for got, wanted in zip(first, oracle(changes, settles=True), strict=True):
        assert_close(got, wanted)


def fsdp_over_tensor_parallelism(module: nn.Linear) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(module, mesh["tp"], ColwiseParallel())
    fully_shard(module, mesh=mesh["dp"])


def sharded_replicas(module: nn.Linear) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    fully_shard(module, mesh=mesh)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("shard", [fsdp_over_tensor_parallelism, sharded_replicas])
def test_on_a_mesh_of_two_dimensions_every_element_counts_once(
    shard: Callable[[nn.Linear], None],
) -> None:
    whole = whole_tensors((7, 3), (7,))

    def measure() -> tuple[Metrics, list[Tensor]]:
        module = nn.Linear(3, 7)
        module.weight, module.bias = (nn.Parameter(tensor.clone()) for tensor in whole)
        shard(module)
        named = list(module.named_parameters())
        meter = ChangeMeter(named, Measurement(Source.UPDATES, EVERY, DECAY, THRESHOLD))
        meter.begin()
        with torch.no_grad():
            for _, parameter in named:
                parameter.mul_(3.0)
        metrics, state = meter.take(), meter.state_dict()
        return metrics, [state[f"weights.{name}"].full_tensor() for name, _ in named]

    (wanted,) = oracle([scaled(whole, 2.0)])
    for metrics, kept in on_ranks(4, measure):
        assert_close(metrics, wanted)
        assert all(torch.equal(a, 3.0 * b) for a, b in zip(kept, whole, strict=True))
