"""Processes of a benchmark: how they are started, and the trainer in each of them."""

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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


def run_worker(starter: str, work: Callable[[dict[str, Any]], None]) -> None:
    """Do, in a process that torchrun has started, what its one argument says in JSON."""
    if len(sys.argv) != 2:
        sys.exit(f"error: {starter} starts this in each of its processes; run that")
    import torch.distributed as dist
    from torchtitan.tools.logging import init_logger

    init_logger()
    work(json.loads(sys.argv[1]))
    dist.barrier()
    dist.destroy_process_group()


def write_on_first_rank(path: Path, content: Any) -> None:
    """Write ``content`` as JSON, whole or not at all, in the process of rank 0."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        part = path.with_suffix(".part")
        part.write_text(json.dumps(content))
        part.rename(path)


class TimedTrainer:
    """A trainer that runs one step after the other and never ends by itself.

    Args:
        keys: Configuration by key.
        arguments: Further arguments of the trainer.
        upstream: Whether it is TorchTitan's own instead of ours.
    """

    def __init__(
        self, keys: Mapping[str, Any], arguments: Sequence[str], *, upstream: bool = False
    ) -> None:
        from torchtitan.protocols import train_spec

        from torchtitan.freezing.launch import prepare

        keys = {"metrics.log_freq": 1_000_000, "training.steps": 10_000, **keys}
        config = prepare([*(f"--{key}={value}" for key, value in keys.items()), *arguments])
        if upstream:
            from torchtitan.train import Trainer as Chosen

            train_spec._extra_train_specs.clear()
        else:
            from torchtitan.freezing.trainer import FreezingTrainer as Chosen
        self.trainer: Any = Chosen(config)
        self.controller = getattr(self.trainer, "controller", None)
        self._data = self.trainer.batch_generator(self.trainer.dataloader)

    def step_ms(self, step: int) -> float:
        """Make a step as if it were number ``step`` and return how long it took."""
        started = time.perf_counter()
        self.trainer.step = step
        self.trainer.train_step(self._data)
        return 1e3 * (time.perf_counter() - started)
