"""Findings of ranks together: meeting, releases, clocks, times of messages."""

import os
import socket
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from timelyfreeze.cli.doctor.host import Finding
from timelyfreeze.runtime.exchange import Exchange

MEET_WITHIN_S = 60.0
_LEAST_GB_PER_S = 0.1  # a network of 1 Gbit/s
_CLOCKS_APART_S = 1.0
_INTERFACES = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
_N_ROUNDS = 10
_N_BYTES = 4 * 2**20


def meet(timeout_s: float = MEET_WITHIN_S) -> Finding | None:
    """Form a process group of all ranks; return the error of a failure."""
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
            f"another node_rank each; with several networks set {_INTERFACES}",
        )
    return None


def _device() -> torch.device:
    local = int(os.environ.get("LOCAL_RANK", 0))
    return torch.device("cuda", local) if torch.cuda.device_count() > local else torch.device("cpu")


def group_findings(exchange: Exchange) -> list[Finding]:
    """Look at all ranks together; every rank must call this."""
    hosts = exchange.all_gather((socket.gethostname(), torch.__version__))
    exchange.all_gather(None)  # now all are here, and look at their clocks at about one time
    found = clocks(exchange.all_gather(time.time()))
    return [ranks(hosts), found, neighbours(_time_links(exchange))]


def ranks(hosts: Sequence[tuple[str, str]]) -> Finding:
    """Judge hosts and torch releases, in the order of ranks."""
    names = list(dict.fromkeys(host for host, _ in hosts))
    shown = ", ".join(f"{sum(h == name for h, _ in hosts)} on {name}" for name in names)
    releases = sorted({release for _, release in hosts})
    found = f"{len(hosts)} met: {shown}, with torch {' and '.join(releases)}"
    remedy = "use one environment on all nodes"
    return Finding("ranks", found, remedy if len(releases) > 1 else None)


def clocks(seconds: Sequence[float]) -> Finding:
    """Judge how far the clocks of ranks are apart, read in the same moment but for a message."""
    apart_s = max(seconds) - min(seconds)
    found = f"at most {apart_s * 1e3:.0f} ms apart, a message's way included"
    remedy = "have all nodes keep time by NTP; logs cannot be compared"
    return Finding("clocks", found, remedy if apart_s > _CLOCKS_APART_S else None)


def neighbours(links: Sequence[tuple[int, float]]) -> Finding:
    """Judge the slowest link: its lower rank, and gigabytes each second."""
    if not links:
        return Finding("neighbours", "none, there is one rank")
    low, speed = min(links, key=lambda link: link[1])
    found = f"{len(links)} pairs; the slowest, ranks {low} and {low + 1}: {speed:.2f} GB/s"
    remedy = "a pipeline waits for such messages: name the fast network with " + _INTERFACES
    return Finding("neighbours", found, remedy if speed < _LEAST_GB_PER_S else None)


def _time_links(exchange: Exchange) -> list[tuple[int, float]]:
    """Time messages between neighbours, pair after pair, as the lower rank sees them."""
    found = []
    for low in range(exchange.size - 1):
        if exchange.rank in (low, low + 1):
            found.append((low, _N_BYTES / 1e6 / max(_one_way_ms(low, exchange.rank), 1e-6)))
        exchange.all_gather(None)
    return [
        link for r, part in enumerate(exchange.all_gather(found)) for link in part if link[0] == r
    ]


def _one_way_ms(low: int, rank: int) -> float:
    """Return half the median round trip of a message, as a rank sees it."""
    message = torch.zeros(_N_BYTES, dtype=torch.uint8, device=_device())
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
