"""Findings of a host: versions, devices, memory, disk, cores."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from timelyfreeze.cli.train import count_gpus, run_environment
from timelyfreeze.files import write_obstacle
from timelyfreeze.timing import usable_cores

_GIB = 2**30
# By package: the first release that works, and the first that need not.
RELEASES = {"torch": ("2.13", "2.16"), "torchtitan": ("0.2.2", "0.2.3")}
_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED = _GIB  # what NCCL's documentation asks for
_LEAST_FREE = _GIB
# Of a device whose memory another process has.
_MOST_TAKEN = 0.1


def host_findings(n_processes: int, output: Path) -> list[Finding]:
    """Look at this host; needs no process group."""
    n_gpus = count_gpus(os.environ)
    return [
        *(package(n, next((d.version for d in distributions(name=n)), None)) for n in RELEASES),
        *devices(n_gpus, n_processes),
        disk(output),
        cores(usable_cores(), n_processes, n_gpus),
    ]


def package(name: str, found: str | None) -> Finding:
    """Judge the version of a package; None if not installed."""
    first, end = RELEASES[name]
    if found is None:
        return Finding(name, "not installed", 'pip install "timelyfreeze[titan]"')
    works = _numbers(first) <= _numbers(found) < _numbers(end)
    return Finding(name, found, None if works else f'pip install "{name}>={first},<{end}"')


def _numbers(release: str) -> list[int]:
    """Return a release as numbers: 2.13 and 2.13.0+cu130 are the same."""
    numbers = [int(part) for part in release.partition("+")[0].split(".") if part.isdecimal()]
    return numbers + [0] * (3 - len(numbers))


def devices(n_listed: int, n_processes: int) -> Iterator[Finding]:
    """Judge devices, their memory, and the host's memory for messages."""
    if n_listed == 0:
        yield Finding("devices", "no GPU; ranks use the CPU")
        return
    import torch  # takes seconds, and tells nothing without a GPU

    n = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if n < n_listed:
        yield Finding(
            "devices",
            f"the driver lists {n_listed} GPUs, torch {torch.__version__} sees {n}",
            "install a torch for this driver's CUDA (nvidia-smi shows it), and see that "
            "CUDA_VISIBLE_DEVICES names GPUs that are there",
        )
        return
    for i in range(n):
        free, total = torch.cuda.mem_get_info(i)
        found = f"{total / _GIB:.1f} GiB, of which {free / _GIB:.1f} are free"
        remedy = "end the process that has its memory (nvidia-smi)"
        is_taken = total - free > _MOST_TAKEN * total
        name = torch.cuda.get_device_name(i)
        yield Finding(f"GPU {i}", f"{name}, {found}", remedy if is_taken else None)
    if n < n_processes:
        yield Finding(
            "devices",
            f"{n_processes} processes and {n} GPUs: all ranks would use the CPU",
            f"start {n} processes here (NGPU, --nproc), or ask the queue for {n_processes} GPUs",
        )
    if n > 1:
        pairs = list(itertools.combinations(range(n), 2))
        direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
        yield Finding("links", f"{direct} of {len(pairs)} pairs of GPUs are linked directly")
        yield shared_memory(shutil.disk_usage(_SHARED_MEMORY).free)


def shared_memory(free: int) -> Finding:
    """Judge the free bytes of /dev/shm, used for messages between GPUs."""
    found = f"{free / _GIB:.2f} GiB free"
    remedy = "NCCL wants 1 GiB or more: start the container with --ipc=host or --shm-size=1g"
    return Finding(str(_SHARED_MEMORY), found, remedy if free < _LEAST_SHARED else None)


def disk(folder: Path) -> Finding:
    """Judge whether the folder of a run's files can be written to and has room."""
    key = "job.dump_folder"
    obstacle = write_obstacle(folder)
    if obstacle is not None:
        return Finding(key, f"{str(folder)!r}: {obstacle}", f"set {key}")
    place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(place).free
    found = f"{str(folder)!r} can be written to, {free / _GIB:.1f} GiB free"
    remedy = f"checkpoints need more: make room, or set {key}"
    return Finding(key, found, remedy if free < _LEAST_FREE else None)


def cores(n_cores: float, n_processes: int, n_gpus: int) -> Finding:
    """Judge cores and threads per process."""
    found = f"{n_cores:g} for {n_processes} processes"
    if n_gpus >= n_processes:
        return Finding("cores", found)
    threads = run_environment(os.environ, n_processes, n_gpus=n_gpus)["OMP_NUM_THREADS"]
    found += f" with {threads} threads each"
    if n_processes > n_cores:
        found += "; ranks share cores, so freezing has little to gain"
    crowded = threads.isdecimal() and int(threads) > 1 and int(threads) * n_processes > n_cores
    remedy = f"set OMP_NUM_THREADS={max(1, int(n_cores) // n_processes)}"
    return Finding("cores", found, remedy if crowded else None)


@dataclass(frozen=True)
class Finding:
    """A finding about a subject."""

    subject: str  # what was looked at, such as "disk"
    found: str  # what is there, values and all
    remedy: str | None = None  # what to do; None where nothing is wrong

    @property
    def is_wrong(self) -> bool:
        """Whether something has to be done."""
        return self.remedy is not None


def render(findings: Sequence[Finding]) -> str:
    """Return a line per finding, with advice below a fault."""
    width = max((len(each.subject) for each in findings), default=0)
    lines = []
    for each in findings:
        mark = "wrong" if each.is_wrong else "ok"
        lines.append(f"{mark:<6} {each.subject:<{width}}  {each.found}")
        if each.is_wrong:
            lines.append(f"{'':<6} {'':<{width}}  -> {each.remedy}")
    return "\n".join(lines)


_PORT = 29500
_TIMEOUT_S = 5.0


def meeting_place(options: Sequence[str], variables: Mapping[str, str]) -> tuple[str, int] | None:
    """Return host and port of the ranks' meeting, as torchrun has them; None if not given."""
    words = re.findall(r"--([\w-]+)[= ]([^ ]+)", " ".join(options))
    told = {name.replace("-", "_"): value for name, value in words}
    endpoint = told.get("rdzv_endpoint") or variables.get("PET_RDZV_ENDPOINT", "")
    if "master_addr" in told:
        endpoint = f"{told['master_addr']}:{told.get('master_port', _PORT)}"
    if not endpoint and "MASTER_ADDR" in variables:
        endpoint = f"{variables['MASTER_ADDR']}:{variables.get('MASTER_PORT', _PORT)}"
    host, _, port = endpoint.partition(":")
    if port and not (port.isdecimal() and int(port) < 2**16):
        raise ValueError(f"ranks are to meet at {endpoint!r}; it must be HOST:PORT")
    return (host, int(port or _PORT)) if host else None


def reached(host: str, port: int) -> Finding:
    """Check the meeting place from this host."""
    what, remedy = "is reached", ""
    try:
        address = socket.gethostbyname(host)
        if _can_listen(address, port):
            what = "is this host, and the port is free"
        elif _can_listen(address, 0):
            what = "is this host, and the port is taken"
            remedy = "choose another master_port, the same on all nodes"
        else:
            socket.create_connection((address, port), timeout=_TIMEOUT_S).close()
    except socket.gaierror as error:
        what, remedy = f"is not known here: {error}", "give its IP address as master_addr"
    except ConnectionRefusedError:
        what = "is reached; nothing listens there yet"
    except OSError as error:
        what = f"is not reached within {_TIMEOUT_S:g} s: {error}"
        remedy = "see that master_addr is right and the firewall lets that port through"
    return Finding("meeting place", f"{host}:{port} {what}", remedy or None)


def _can_listen(address: str, port: int) -> bool:
    """Return whether the port of an address can be opened here; port 0 is any."""
    with suppress(OSError), socket.create_server((address, port)):
        return True
    return False
