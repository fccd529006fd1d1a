"""What ranks find together: whether they meet, how their clocks differ, what messages take."""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from timelyfreeze.cli.doctor.finding import Finding
from timelyfreeze.runtime.exchange import Exchange
from timelyfreeze.timing import clock_offsets

MEET_WITHIN_S = 60.0
_CLOCKS_APART_MS = 1000.0
_LEAST_GB_PER_S = 0.1  # a network of 1 Gbit/s
_N_ROUNDS = 10
_SMALL, _LARGE = 8, 4 * 2**20  # bytes

# When the first clock sent, the other received and sent back, and the first received; ms.
Round = tuple[float, float, float, float]


def meet(timeout_s: float = MEET_WITHIN_S) -> Finding | None:
    """Form a process group of all ranks; return what is wrong if it cannot be."""
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    try:
        device = _device()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=timeout_s),
        )
        dist.all_reduce(torch.ones(1, device=device))
    except (RuntimeError, ValueError) as error:
        return Finding(
            "ranks",
            f"rank {rank} of {size} on {socket.gethostname()} did not meet the others within "
            f"{timeout_s:g} s: {str(error).partition(chr(10))[0]}",
            "start all nodes within that time, with the same master_addr and master_port and "
            "another node_rank each; with several networks set GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME",
        )
    return None


def _device() -> torch.device:
    local = int(os.environ.get("LOCAL_RANK", 0))
    return torch.device("cuda", local) if torch.cuda.device_count() > local else torch.device("cpu")


def group_findings(exchange: Exchange) -> list[Finding]:
    """Look at all ranks together; every rank must call this, and rank 0 gets the findings."""
    hosts = exchange.all_gather((socket.gethostname(), torch.__version__))
    rounds = _ask_clocks(exchange)
    links = _time_links(exchange)
    if exchange.rank != 0:
        return []
    return [ranks(hosts), clocks(rounds), neighbours(links)]


def ranks(hosts: Sequence[tuple[str, str]]) -> Finding:
    """Judge what ranks have of host and torch, in the order of ranks."""
    names = list(dict.fromkeys(host for host, _ in hosts))
    shown = ", ".join(f"{sum(h == name for h, _ in hosts)} on {name}" for name in names)
    releases = sorted({release for _, release in hosts})
    if len(releases) == 1:
        return Finding("ranks", f"{len(hosts)} met: {shown}")
    return Finding(
        "ranks",
        f"{len(hosts)} met: {shown}, with torch {' and '.join(releases)}",
        "use one environment on all nodes",
    )


def clocks(rounds: Sequence[Sequence[Round]]) -> Finding:
    """Judge how far clocks of ranks are from that of rank 0.

    Args:
        rounds: Messages between rank 0 and each other rank, there and back.
    """
    least = np.full((len(rounds) + 1, len(rounds) + 1), -np.inf)
    for other, seen in enumerate(rounds, start=1):
        least[0, other] = max(sent - got for sent, got, _, _ in seen)
        least[other, 0] = max(sent_back - got_back for _, _, sent_back, got_back in seen)
    ahead_ms = -clock_offsets(least)
    worst = int(np.argmax(np.abs(ahead_ms)))
    found = f"at most {abs(ahead_ms[worst]):.1f} ms from that of rank 0 (rank {worst})"
    if abs(ahead_ms[worst]) <= _CLOCKS_APART_MS:
        return Finding("clocks", found)
    return Finding("clocks", found, "have all nodes keep time by NTP; logs cannot be compared")


def neighbours(links: Sequence[tuple[int, float, float]]) -> Finding:
    """Judge the slowest link: lower rank, latency in ms, gigabytes each second."""
    if not links:
        return Finding("neighbours", "none, there is one rank")
    low, latency_ms, speed = min(links, key=lambda link: link[2])
    found = (
        f"{len(links)} pairs; the slowest, ranks {low} and {low + 1}: {latency_ms:.3f} ms, "
        f"{speed:.2f} GB/s"
    )
    if speed >= _LEAST_GB_PER_S:
        return Finding("neighbours", found)
    return Finding(
        "neighbours",
        f"{found}; below {_LEAST_GB_PER_S:g} a pipeline waits for its messages",
        "name the fast network with GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
    )


def _ask_clocks(exchange: Exchange) -> list[list[Round]]:
    """Return rounds between rank 0 and each other rank, on rank 0; elsewhere nothing."""
    found: list[list[Round]] = []
    for other in range(1, exchange.size):
        if exchange.rank == 0:
            found.append([_ask_clock(other) for _ in range(_N_ROUNDS)])
        elif exchange.rank == other:
            for _ in range(_N_ROUNDS):
                _answer_clock()
        exchange.all_gather(None)
    return found


def _ask_clock(other: int) -> Round:
    box = torch.zeros(2, dtype=torch.float64)
    sent = _wall_ms()
    dist.send(box, other)
    dist.recv(box, other)
    back = _wall_ms()
    got, sent_back = box.tolist()
    return sent, got, sent_back, back


def _answer_clock() -> None:
    box = torch.zeros(2, dtype=torch.float64)
    dist.recv(box, 0)
    box[0] = _wall_ms()
    box[1] = _wall_ms()
    dist.send(box, 0)


def _wall_ms() -> float:
    return time.time() * 1e3


def _time_links(exchange: Exchange) -> list[tuple[int, float, float]]:
    """Time a small and a large message between neighbours, one pair after the other."""
    found = []
    for low in range(exchange.size - 1):
        if exchange.rank in (low, low + 1):
            small_ms, large_ms = (_one_way_ms(n, low, exchange.rank) for n in (_SMALL, _LARGE))
            found.append((low, small_ms, _LARGE / 1e6 / max(large_ms, 1e-6)))
        exchange.all_gather(None)
    return sorted({link[0]: link for part in exchange.all_gather(found) for link in part}.values())


def _one_way_ms(n_bytes: int, low: int, rank: int) -> float:
    """Return half of the median time that a message takes there and back, as a rank sees it."""
    message = torch.zeros(n_bytes, dtype=torch.uint8, device=_device())
    times_ms = []
    for _ in range(_N_ROUNDS):
        start = time.perf_counter()
        if rank == low:
            dist.send(message, low + 1)
            dist.recv(message, low + 1)
        else:
            dist.recv(message, low)
            dist.send(message, low)
        if message.is_cuda:
            torch.cuda.synchronize(message.device)
        times_ms.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times_ms[1:]) / 2.0
