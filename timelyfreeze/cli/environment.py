"""Environment of a run: GPUs or the CPU, threads, and what libraries are told."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

# What libraries are told in every process that loads them, where the user has not.
DEFAULTS = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # Forks of a loader would warn in every process.
    "TOKENIZERS_PARALLELISM": "false",
    # Seconds that torchrun gives ranks after a signal: steps may take longer than its own 30.
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",
    # How often a thread that waits for the others looks before it sleeps. As often as OpenMP does
    # by default, it keeps the core from the thread that it waits for where others use the machine.
    "GOMP_SPINCOUNT": "10000",
}


def run_environment(
    base: Mapping[str, str],
    n_processes: int,
    *,
    n_gpus: int | None = None,
    n_cores: int | None = None,
) -> dict[str, str]:
    """Return the environment of a run's processes. The only place that has these rules.

    A process gets a GPU of its own. With fewer GPUs than processes all of them use the CPU, whose
    cores they divide among themselves. What ``base`` sets already stays, but for the GPUs then.

    Args:
        base: The environment that the command was started in.
        n_processes: Processes on this host.
        n_gpus: GPUs that a run could use; None to count them.
        n_cores: Cores of this host; None to count them.
    """
    n_gpus = count_gpus(base) if n_gpus is None else n_gpus
    n_cores = len(os.sched_getaffinity(0)) if n_cores is None else n_cores
    variables = {**DEFAULTS, **base}
    if n_gpus < n_processes:
        variables["CUDA_VISIBLE_DEVICES"] = ""
        variables.setdefault("OMP_NUM_THREADS", str(max(1, n_cores // n_processes)))
    return variables


def count_gpus(base: Mapping[str, str]) -> int:
    """Return how many GPUs a process with the environment ``base`` sees, without loading torch."""
    chosen = base.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([part for part in chosen.split(",") if part.strip()])
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU") for line in listed.stdout.splitlines())
