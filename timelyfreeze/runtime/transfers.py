"""What a message from one pipeline rank to its neighbour takes.

Ranks share no clock, so a message is sent there and back and half of that time counts. Nobody
computes meanwhile, and no other message is on its way but those of data-parallel replicas: what a
busy rank adds to a message is its overhead, which :mod:`timelyfreeze.timing.p2p_costs` finds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from timelyfreeze.runtime.exchange import Exchange
from timelyfreeze.runtime.stage import FreezingStage
from timelyfreeze.schedule import ScheduleOrder

_N_DISCARDED, _N_COUNTED = 3, 15


def pipeline_links(order: ScheduleOrder) -> list[tuple[int, int]]:
    """Return the pairs of ranks that send each other messages, the lower first, each once."""
    holders = order.stage_to_rank
    return sorted({(min(a, b), max(a, b)) for a, b in pairwise(holders) if a != b})


def measure_transfers(
    stages: Sequence[FreezingStage], order: ScheduleOrder, exchange: Exchange, device: torch.device
) -> dict[tuple[int, int], float]:
    """Time a message of the size that stages send over every link of the pipeline.

    Every rank must call this at the same time, between two batches.

    Returns:
        Milliseconds by sending and receiving rank, both ways, of the links that this rank timed:
        those to ranks of a higher number.
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
    """Send to ``peer`` and wait for its answer, again and again; return the median of one way."""
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
