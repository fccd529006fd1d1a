"""What one host has for its processes: versions, devices, memory, disk, cores."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from timelyfreeze.cli.doctor.finding import Finding
from timelyfreeze.cli.environment import count_gpus, run_environment
from timelyfreeze.files import write_obstacle
from timelyfreeze.timing import usable_cores

_GIB = 2**30
# By package: the first release that works, the first that need not, and the one that is tested.
RELEASES = {"torch": ("2.11", "2.14", "2.13.0"), "torchtitan": ("0.2.2", "0.2.3", "0.2.2")}
_PYTHONS = ((3, 11), (3, 12))
_SHARED_MEMORY = Path("/dev/shm")
# What NCCL's documentation asks for.
_LEAST_SHARED = _GIB
_LEAST_FREE = _GIB
# Of a device whose memory another process has.
_MOST_TAKEN = 0.1


@dataclass(frozen=True)
class Folder:
    """A folder that a run writes to; ``n_bytes`` is what it needs, ``key`` what names it."""

    path: Path
    key: str
    n_bytes: int = _LEAST_FREE


def folders_of(config: Mapping[str, Any], n_processes: int) -> list[Folder]:
    """Return where a run with a configuration, as TOML has it, writes to on this host."""
    output = Path(_value(config, "job", "dump_folder", default="./outputs"))
    cache = config.get("freezing", {}).get("cache", {})
    folders = [Folder(output, "job.dump_folder")]
    if (disk_gib := cache.get("disk_gib", 0)) > 0:
        path = output / cache.get("folder", "activation_cache")
        folders.append(Folder(path, "freezing.cache.folder", int(n_processes * disk_gib * _GIB)))
    return folders


def _value(config: Mapping[str, Any], section: str, key: str, *, default: str) -> str:
    found: str = config.get(section, {}).get(key, default)
    return found


def host_findings(n_processes: int, folders: list[Folder]) -> list[Finding]:
    """Look at this host; needs no process group.

    Args:
        n_processes: Ranks that a run has here.
        folders: Where it writes to.
    """
    n_gpus = count_gpus(os.environ)
    return [
        python(sys.version_info[:3]),
        *(package(name, installed(name)) for name in ("timelyfreeze", *RELEASES)),
        *devices(n_gpus, n_processes),
        shared_memory(shutil.disk_usage(_SHARED_MEMORY).free, n_gpus),
        *(disk(folder) for folder in folders),
        cores(usable_cores(), n_processes, n_gpus),
    ]


def installed(name: str) -> str | None:
    """Return the version of an installed package; None if it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def python(found: tuple[int, ...]) -> Finding:
    """Judge the version of Python."""
    text = ".".join(map(str, found))
    if tuple(found[:2]) in _PYTHONS:
        return Finding("python", text)
    return Finding("python", text, "make the environment with Python 3.11 or 3.12")


def package(name: str, found: str | None) -> Finding:
    """Judge the version of a package."""
    if found is None:
        return Finding(name, "not installed", 'pip install "timelyfreeze[titan]"')
    if name not in RELEASES:
        return Finding(name, found)
    first, end, tested = RELEASES[name]
    if _numbers(found) == _numbers(tested):
        return Finding(name, f"{found}, the tested release")
    text = f"{found}, tested is {tested}"
    if _numbers(first) <= _numbers(found) < _numbers(end):
        return Finding(name, text)
    remedy = f'pip install "{name}=={tested}", or one from {first} to below {end}'
    return Finding(name, text, remedy)


def _numbers(release: str) -> list[int]:
    """Return a release as numbers: 2.13 and 2.13.0+cu130 are the same."""
    numbers = [int(part) for part in release.partition("+")[0].split(".") if part.isdecimal()]
    return numbers + [0] * (3 - len(numbers))


def devices(n_listed: int, n_processes: int) -> Iterator[Finding]:
    """Judge devices, their memory, and the links between them.

    Args:
        n_listed: GPUs that the driver lists, as far as this process may see them.
        n_processes: Ranks on this host.
    """
    if n_listed == 0:
        yield Finding("devices", "no GPU; ranks use the CPU")
        yield Finding("links", "none, there is no GPU")
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
        yield _memory(i, torch.cuda.get_device_name(i), *torch.cuda.mem_get_info(i))
    if n < n_processes:
        yield Finding(
            "devices",
            f"{n_processes} processes and {n} GPUs: all ranks would use the CPU",
            f"start {n} processes here (NGPU, --nproc), or ask the queue for {n_processes} GPUs",
        )
    pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
    direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    others = "" if direct == len(pairs) else "; others pass through the host's memory"
    yield Finding("links", f"{direct} of {len(pairs)} pairs of GPUs are linked directly{others}")


def _memory(index: int, name: str, free: int, total: int) -> Finding:
    found = f"{name}, {total / _GIB:.1f} GiB, of which {free / _GIB:.1f} are free"
    if total - free <= _MOST_TAKEN * total:
        return Finding(f"GPU {index}", found)
    return Finding(f"GPU {index}", found, "end the process that has its memory (nvidia-smi)")


def shared_memory(free: int, n_gpus: int) -> Finding:
    """Judge what /dev/shm has free, bytes; ranks on GPUs pass messages through it."""
    found = f"{free / _GIB:.2f} GiB free"
    if n_gpus < 2 or free >= _LEAST_SHARED:
        return Finding(str(_SHARED_MEMORY), found)
    return Finding(
        str(_SHARED_MEMORY),
        f"{found}; NCCL wants {_LEAST_SHARED // _GIB} or more",
        "start the container with --ipc=host or --shm-size=1g",
    )


def disk(folder: Folder) -> Finding:
    """Judge whether a folder can be written to and has room."""
    obstacle = write_obstacle(folder.path)
    if obstacle is not None:
        return Finding(folder.key, f"{str(folder.path)!r}: {obstacle}", f"set {folder.key}")
    place = folder.path
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    found = f"{str(folder.path)!r} can be written to, {free / _GIB:.1f} GiB free"
    if free >= folder.n_bytes:
        return Finding(folder.key, found)
    return Finding(
        folder.key,
        f"{found} of {folder.n_bytes / _GIB:.1f} that it needs",
        f"make room, or set {folder.key}",
    )


def cores(n_cores: float, n_processes: int, n_gpus: int) -> Finding:
    """Judge the cores, and the threads that each process of a run would have."""
    threads = run_environment(os.environ, n_processes, n_gpus=n_gpus).get("OMP_NUM_THREADS", "")
    each = f"{threads} threads" if threads else "torch's own number of threads"
    found = f"{n_cores:g} for {n_processes} processes with {each} each"
    if n_gpus >= n_processes or not threads.isdecimal():
        return Finding("cores", found)
    if int(threads) > 1 and int(threads) * n_processes > n_cores:
        least = max(1, int(n_cores) // n_processes)
        return Finding("cores", found, f"set OMP_NUM_THREADS={least}")
    shared = "; ranks share cores, so freezing has little to gain" if n_processes > n_cores else ""
    return Finding("cores", found + shared)
