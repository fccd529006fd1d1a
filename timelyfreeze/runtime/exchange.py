"""The few words ranks exchange about freezing, over ``torch.distributed``."""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from timelyfreeze.runtime.stage import FreezingStage
from timelyfreeze.schedule import ScheduleOrder


class Exchange:
    """Object collectives of a process group. None is the default group of all ranks."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of ranks, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def gather(self, value: Any) -> list[Any] | None:
        """Return every rank's value on rank 0 and None elsewhere."""
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, group=self._group, group_dst=0)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        return box[0]


class GridExchange(Exchange):
    """Collectives of all processes of a pipeline and of its replicas, by both groups.

    Processes are numbered pipeline by pipeline. ``replicas`` are the processes with the same
    stages: data-parallel replicas, and processes with shares of tensors.
    """

    def __init__(self, pipeline: dist.ProcessGroup | None, replicas: dist.ProcessGroup) -> None:
        self._pipeline, self._replicas = Exchange(pipeline), Exchange(replicas)
        self.rank = self._replicas.rank * self._pipeline.size + self._pipeline.rank
        self.size = self._pipeline.size * self._replicas.size

    def all_gather(self, value: Any) -> list[Any]:
        """Return every process's value, in the order of their numbers, on every process."""
        rows = self._replicas.all_gather(self._pipeline.all_gather(value))
        return [value for row in rows for value in row]

    def gather(self, value: Any) -> list[Any] | None:
        """Return every process's value on process 0 and None elsewhere."""
        row = self._pipeline.gather(value)
        rows = None if row is None else self._replicas.gather(row)
        return None if rows is None else [value for row in rows for value in row]

    def broadcast(self, value: Any) -> Any:
        """Return process 0's value on every process."""
        first = self._replicas.broadcast(value) if self._pipeline.rank == 0 else None
        return self._pipeline.broadcast(first)


def exchange_of(
    stages: Sequence[Any],
    pipeline_group: dist.ProcessGroup | None,
    data_parallel_group: dist.ProcessGroup | None,
) -> Exchange:
    """Return the exchange of all processes with equal freezing.

    ``pipeline_group`` None is the group of the stages; where neither is named, all processes of the
    default group take part. Processes sharing tensors cannot be left out.
    """
    if data_parallel_group is not None:
        return GridExchange(pipeline_group or stages[0].group, data_parallel_group)
    if pipeline_group is None:
        return Exchange()
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    if any(isinstance(p, DTensor) and p.device_mesh.size() > 1 for p in parameters):
        raise ValueError(
            "pipeline_group is given and data_parallel_group is None, but parameters are split "
            "between processes, which have to freeze the same; name the group of the processes "
            "that hold the same stages"
        )
    return Exchange(pipeline_group)


@contextmanager
def together(call: str) -> Iterator[None]:
    """Add to a failure among ranks the hint at a missing rank, absent from torch's."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{call} failed among the ranks: {error}; every rank must call it, at the same place"
        ) from error


_N_DISCARDED, _N_COUNTED = 3, 15


def pipeline_links(order: ScheduleOrder) -> list[tuple[int, int]]:
    """Return the pairs of ranks with messages, the lower first, without repeats."""
    holders = order.stage_to_rank
    return sorted({(min(a, b), max(a, b)) for a, b in pairwise(holders) if a != b})


def measure_transfers(
    stages: Sequence[FreezingStage], order: ScheduleOrder, exchange: Exchange, device: torch.device
) -> dict[tuple[int, int], float]:
    """Time a stage-sized message over every link of the pipeline.

    A collective call of all ranks, between two batches. Returns milliseconds by sending and
    receiving rank, both ways, of links to ranks of a higher number.
    """
    n_bytes = max(exchange.all_gather(max(stage.message_bytes for stage in stages)))
    links = pipeline_links(order)
    if n_bytes == 0 or not links:
        return {}
    group = stages[0].group
    rank = dist.get_rank(group)
    message = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    p2p_latency_ms: dict[tuple[int, int], float] = {}
    for low, high in links:
        if rank == low:
            p2p_latency_ms[low, high] = p2p_latency_ms[high, low] = _ask(message, high, group)
        elif rank == high:
            _answer(message, low, group)
        # One link after the other: ranks may share cores, and links a wire.
        exchange.all_gather(None)
    return p2p_latency_ms


def _ask(message: torch.Tensor, peer: int, group: dist.ProcessGroup | None) -> float:
    """Send to ``peer`` and wait for its answer, repeatedly; return the median one-way time."""
    there_and_back_ms = []
    for _ in range(_N_DISCARDED + _N_COUNTED):
        start_ms = _now_ms(message.device)
        dist.send(message, group=group, group_dst=peer)
        dist.recv(message, group=group, group_src=peer)
        there_and_back_ms.append(_now_ms(message.device) - start_ms)
    return statistics.median(there_and_back_ms[_N_DISCARDED:]) / 2.0


def _answer(message: torch.Tensor, peer: int, group: dist.ProcessGroup | None) -> None:
    for _ in range(_N_DISCARDED + _N_COUNTED):
        dist.recv(message, group=group, group_src=peer)
        dist.send(message, group=group, group_dst=peer)


def _now_ms(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() * 1e3
