"""``timelyfreeze doctor``: what is wrong with this host, and with ranks together."""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from timelyfreeze.cli.doctor.address import address_findings, meeting_place
from timelyfreeze.cli.doctor.finding import Finding, render
from timelyfreeze.cli.doctor.host import folders_of, host_findings
from timelyfreeze.cli.environment import count_gpus, run_environment
from timelyfreeze.cli.train import ALONE
from timelyfreeze.files.options import existing_file, status_of, whole

# Of a process that torchrun started: our torchrun then ends without a stack trace.
_WRONG_OF_RANK = 2


def main(arguments: Sequence[str]) -> int:
    """Print what was found; return 1 if something is wrong, 2 for wrong arguments."""
    options = _parser().parse_args(list(arguments))
    return status_of(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="timelyfreeze doctor",
        description="Looks at versions, devices, memory, disk, ports and cores, and with --nproc "
        "or under torchrun at all ranks together. Exits with 1 if something is wrong.",
    )
    add = parser.add_argument
    add("config", nargs="?", type=existing_file, metavar="CONFIG", help="TOML file of a run")
    add(
        "--nproc", type=whole(1, 99_999), metavar="N",
        help="start N processes on this host, which look at their clocks and links together",
    )  # fmt: skip
    add(
        "--torchrun", default=os.environ.get("TORCHRUN_ARGS", ""), metavar="OPTIONS",
        help="options of torchrun for several hosts, as one text (default: $TORCHRUN_ARGS)",
    )  # fmt: skip
    return parser


def _run(options: argparse.Namespace) -> int:
    config = {} if options.config is None else _read(options.config)
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if launched:
        return _WRONG_OF_RANK if _as_rank(config) else 0
    torchrun = shlex.split(options.torchrun)
    n_processes = options.nproc or _count_processes()
    findings = [
        *host_findings(n_processes, folders_of(config, n_processes)),
        *address_findings(meeting_place(torchrun, os.environ)),
    ]
    print(render(findings), flush=True)
    n_wrong = sum(each.is_wrong for each in findings)
    if options.nproc is not None and not _launch(options, torchrun):
        n_wrong += 1
    print(f"\n{n_wrong} wrong" if n_wrong else "\nNothing is wrong")
    return 1 if n_wrong else 0


def _read(config: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(config.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{config} is no TOML: {error}") from error


def _count_processes() -> int:
    told = os.environ.get("NGPU", "")
    return int(told) if told.isdecimal() and int(told) else max(1, count_gpus(os.environ))


def _launch(options: argparse.Namespace, torchrun: Sequence[str]) -> bool:
    """Start this command again as ranks; return whether they found nothing wrong."""
    command = [
        sys.executable, "-m", "timelyfreeze.cli.torchrun", f"--nproc_per_node={options.nproc}",
        *(torchrun or ALONE), "-m", "timelyfreeze", "doctor",
        *([] if options.config is None else [str(options.config)]),
    ]  # fmt: skip
    return subprocess.run(command, env=run_environment(os.environ, options.nproc)).returncode == 0


def _as_rank(config: Mapping[str, Any]) -> bool:
    """Look at all ranks together and print on rank 0; return whether something is wrong.

    The first process of each other host looks at its host too: nobody did that before.
    """
    import torch.distributed as dist  # takes seconds, which only ranks have to spend

    from timelyfreeze.cli.doctor.group import group_findings, meet
    from timelyfreeze.runtime.exchange import Exchange

    failed = meet()
    if failed is not None:
        print(render([failed]), flush=True)
        return True
    exchange = Exchange()
    of_host: list[Finding] = []
    if int(os.environ["LOCAL_RANK"]) == 0:
        n_processes = int(os.environ["LOCAL_WORLD_SIZE"])
        of_host = host_findings(n_processes, folders_of(config, n_processes))
    hosts = exchange.all_gather((socket.gethostname(), [f for f in of_host if f.is_wrong]))
    findings = group_findings(exchange)
    findings += [
        Finding(f"{host}: {each.subject}", each.found, each.remedy)
        for host, wrong in hosts
        for each in wrong
    ]
    if exchange.rank == 0:
        print(render(findings), flush=True)
    is_wrong: bool = exchange.broadcast(any(each.is_wrong for each in findings))
    dist.destroy_process_group()
    return is_wrong
