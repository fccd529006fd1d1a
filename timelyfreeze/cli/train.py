"""``timelyfreeze train``: starts a run with torchrun, in the environment that it needs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from timelyfreeze.cli.environment import count_gpus, run_environment
from timelyfreeze.files.options import parse_with_keys, words

MAX_PROCESSES = 99_999
# One host; any free port.
ALONE = ("--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0")


def main(arguments: Sequence[str]) -> int:
    """Start the run that ``arguments`` ask for; return 2 if they are wrong, and else not at all."""
    options, keys = parse_with_keys(_parser(), arguments)
    keys += ["--quiet"] if options.quiet else []
    if not options.config.is_file():
        return _refuse(f"CONFIG is {str(options.config)!r}, which is no file")
    n_processes = options.nproc
    if not (n_processes.isdecimal() and 1 <= int(n_processes) <= MAX_PROCESSES):
        return _refuse(
            f"--nproc (NGPU) is {n_processes!r}; it must be a number of processes, 1 or more"
        )
    n_gpus = count_gpus(os.environ)
    if 0 < n_gpus < int(n_processes):
        print(
            f"Using the CPU: {n_processes} processes were asked for and {n_gpus} GPUs are visible"
        )
    command = train_command(options.config, int(n_processes), keys, torchrun=options.torchrun)
    environment = run_environment(os.environ, int(n_processes), n_gpus=n_gpus)
    sys.stdout.flush()
    # In place of this process, so that a signal reaches torchrun itself.
    os.execve(command[0], command, environment)


def train_command(
    config: Path, n_processes: int, keys: Sequence[str] = (), *, torchrun: Sequence[str] = ()
) -> list[str]:
    """Return the command that trains with ``config``.

    Args:
        config: A TOML file.
        n_processes: Processes on this host.
        keys: ``--section.key=value``, which win over the file.
        torchrun: Options of torchrun for a run over several hosts; empty for this host alone.
    """
    return [
        sys.executable, "-m", "timelyfreeze.cli.torchrun", f"--nproc_per_node={n_processes}",
        *(torchrun or ALONE), "-m", "timelyfreeze.cli.worker",
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
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file")
    parser.add_argument(
        "--nproc",
        default=os.environ.get("NGPU", "4"),
        metavar="N",
        help="processes on this host; on the CPU if there are fewer GPUs (default: $NGPU, or 4)",
    )
    parser.add_argument(
        "--torchrun",
        type=words,
        default=os.environ.get("TORCHRUN_ARGS", ""),
        metavar="OPTIONS",
        help="options of torchrun for several hosts, as one text (default: $TORCHRUN_ARGS)",
    )
    parser.add_argument(
        "--quiet", action="store_true", help="print where the report is, and nothing else"
    )
    return parser


def _refuse(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2
