"""``timelyfreeze train``: starts a run by torchrun, in its environment."""

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from timelyfreeze.files.options import existing_file, parse_with_keys, whole, words

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
    """Return the environment of a run's processes; the only place with these rules.

    Every process gets a GPU. With fewer GPUs than processes all of them use the CPU, whose cores
    they divide among themselves. Settings in ``base`` win, but for the GPUs then.
    """
    n_gpus = count_gpus(base) if n_gpus is None else n_gpus
    n_cores = len(os.sched_getaffinity(0)) if n_cores is None else n_cores
    variables = {**DEFAULTS, **base}
    if n_gpus < n_processes:
        variables["CUDA_VISIBLE_DEVICES"] = ""
        variables.setdefault("OMP_NUM_THREADS", str(max(1, n_cores // n_processes)))
    return variables


def count_gpus(base: Mapping[str, str]) -> int:
    """Return the number of GPUs visible with the environment ``base``.

    The driver's tool is asked, since torch takes seconds to load, and torch where that fails.
    """
    chosen = base.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([part for part in chosen.split(",") if part.strip()])
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False
        )
        listed.check_returncode()
    except (OSError, subprocess.SubprocessError):
        import torch

        return int(torch.cuda.device_count())
    return sum(line.startswith("GPU") for line in listed.stdout.splitlines())


# Started by torchrun in each process of a run.
WORKER = "timelyfreeze.cli.worker"
# One host; any free port.
ALONE = ("--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0")


def main(arguments: Sequence[str]) -> int:
    """Start the run of ``arguments``, in the place of this process."""
    options, keys = parse_with_keys(_parser(), arguments)
    keys += ["--quiet"] if options.quiet else []
    n_processes, n_gpus = options.nproc, count_gpus(os.environ)
    if 0 < n_gpus < n_processes:
        print(
            f"Using the CPU: {n_processes} processes were asked for and {n_gpus} GPUs are visible"
        )
    command = train_command(options.config, n_processes, keys, torchrun=options.torchrun)
    environment = run_environment(os.environ, n_processes, n_gpus=n_gpus)
    sys.stdout.flush()
    # In place of this process, so that a signal reaches torchrun itself.
    os.execve(command[0], command, environment)


def train_command(
    config: Path, n_processes: int, keys: Sequence[str] = (), *, torchrun: Sequence[str] = ()
) -> list[str]:
    """Return the command to train with ``config``."""
    return [
        sys.executable, "-m", "timelyfreeze.cli.torchrun", f"--nproc_per_node={n_processes}",
        *(torchrun or ALONE), "-m", WORKER,
        "--job.config_file", str(config), *keys,
    ]  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="timelyfreeze train",
        description="Train with a TOML file over a pipeline of processes, one for each GPU.",
        epilog="Further arguments are keys of the configuration, --section.key=value; they win "
        "over the file. docs/configuration.md lists them.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("config", type=existing_file, metavar="CONFIG", help="TOML file")
    add(
        "--nproc", type=whole(1, 99_999), default=os.environ.get("NGPU", "4"), metavar="NGPU",
        help="processes on this host; on the CPU if there are fewer GPUs (default: $NGPU, or 4)",
    )  # fmt: skip
    add(
        "--torchrun", type=words, default=os.environ.get("TORCHRUN_ARGS", ""), metavar="OPTIONS",
        help="options of torchrun for several hosts, as one text (default: $TORCHRUN_ARGS)",
    )  # fmt: skip
    add("--quiet", action="store_true", help="print where the report is, and nothing else")
    return parser
