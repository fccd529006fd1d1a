"""What benchmarks share: options, the processes that they start, and the machine's name."""

import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from timelyfreeze.cli import run_environment
from timelyfreeze.files.options import new_folder, wrong

ROOT = Path(__file__).resolve().parents[1]
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"]


def schedule_name(text: str) -> str:
    """Return the name of a schedule that torch knows; the type of an option."""
    # Imported late: it loads torch, which --help does without.
    from timelyfreeze.runtime import SCHEDULES

    if text not in SCHEDULES:
        raise wrong(text, f"must be one of {', '.join(SCHEDULES)}")
    return text


def new_file(text: str) -> Path:
    """Return a path at which a file can be written; better known now than after hours."""
    path = Path(text)
    if os.path.isdir(path) or not os.path.isdir(path.parent):
        raise wrong(text, "must be a file in a folder that is there")
    new_folder(str(path.parent))
    return path


def command_of(worker: str, n_processes: int, task: Mapping[str, Any]) -> list[str]:
    """Return the command that starts ``worker``, a script of this folder, with what to do."""
    return [
        sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={n_processes}",
        "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0",
        str(ROOT / "benchmarks" / worker), json.dumps(task),
    ]  # fmt: skip


def environment(n_processes: int) -> dict[str, str]:
    """Return the environment of so many workers: one thread each, as an emulated rank has."""
    return run_environment({"OMP_NUM_THREADS": "1", **os.environ}, n_processes)


def machine() -> str:
    """Return what the times were measured on."""
    import torch

    from torchtitan.upstream.cpu_device import CpuDevice

    device = torch.cuda if torch.cuda.is_available() else CpuDevice
    return (
        f"{device.get_device_name()}, {os.cpu_count()} cores, {platform.system()}, "
        f"torch {torch.__version__}"
    )
