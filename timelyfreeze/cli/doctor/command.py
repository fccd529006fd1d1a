"""``timelyfreeze doctor``: faults of this host, and of ranks together."""

import argparse
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from timelyfreeze.cli.doctor.host import Finding, host_findings, meeting_place, reached, render
from timelyfreeze.cli.hub import KEY, config_table, is_hub_id, value_of
from timelyfreeze.cli.train import ALONE, count_gpus, run_environment
from timelyfreeze.files.options import existing_file, status_of, whole, words

# Of a process that torchrun started: our torchrun then ends without a stack trace.
_WRONG_OF_RANK = 2


def main(arguments: Sequence[str]) -> int:
    """Print the findings; return 1 for a fault, 2 for wrong arguments."""
    options = _parser().parse_args(list(arguments))
    return status_of(lambda: _run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="timelyfreeze doctor",
        description="Looks at versions, devices, disk, cores and the meeting place, and with "
        "--nproc or under torchrun at all ranks together. Exits with 1 if something is wrong.",
    )
    add = parser.add_argument
    add("config", nargs="?", type=existing_file, metavar="CONFIG", help="TOML file of a run")
    add(
        "--nproc", type=whole(1, 99_999), metavar="N",
        help="start N processes on this host, which look whether they meet, and at their links",
    )  # fmt: skip
    add(
        "--torchrun", type=words, default=os.environ.get("TORCHRUN_ARGS", ""), metavar="OPTIONS",
        help="options of torchrun for several hosts, as one text (default: $TORCHRUN_ARGS)",
    )  # fmt: skip
    return parser


def _run(options: argparse.Namespace) -> int:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _WRONG_OF_RANK if _as_rank() else 0
    told = os.environ.get("NGPU", "")
    known = int(told) if told.isdecimal() else 0
    n_processes = options.nproc or known or max(1, count_gpus(os.environ))
    findings = host_findings(n_processes, _output_of(options.config))
    findings += _missing_folders(options.config)
    if (place := meeting_place(options.torchrun, os.environ)) is not None:
        findings.append(reached(*place))
    print(render(findings), flush=True)
    n_wrong = sum(each.is_wrong for each in findings)
    if options.nproc is not None:
        # Once more, as ranks.
        command = [
            sys.executable, "-m", "timelyfreeze.cli.torchrun", f"--nproc_per_node={options.nproc}",
            *(options.torchrun or ALONE), "-m", "timelyfreeze", "doctor",
        ]  # fmt: skip
        variables = run_environment(os.environ, options.nproc)
        n_wrong += subprocess.run(command, env=variables).returncode != 0
    print(f"\n{n_wrong} wrong" if n_wrong else "\nNothing is wrong")
    return 1 if n_wrong else 0


def _output_of(config: Path | None) -> Path:
    """Return the output folder of a run, with a configuration or without."""
    if config is None:
        return Path("outputs")
    try:
        job = tomllib.loads(config.read_text("utf-8-sig")).get("job", {})
        return Path(job.get("dump_folder", "outputs")).expanduser()
    except (ValueError, RuntimeError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{config} is no TOML that has a text as job.dump_folder: {error}"
        ) from error


def _missing_folders(config: Path | None) -> Iterator[Finding]:
    """Find model folders neither here nor on the hub."""
    for key in (KEY, "checkpoint.initial_load_path"):
        name = value_of((), config_table(config), key)
        if isinstance(name, str) and not (is_hub_id(name) or Path(name).expanduser().is_dir()):
            yield Finding(key, f"{name!r} is no folder here", f"name a folder as {key}")


def _as_rank() -> bool:
    """Look at all ranks together and print on rank 0; return whether something is wrong."""
    import torch.distributed as dist  # takes seconds, which only ranks have to spend

    from timelyfreeze.cli.doctor.group import group_findings, meet
    from timelyfreeze.runtime.exchange import Exchange

    failed = meet()
    if failed is not None:
        print(render([failed]), flush=True)
        return True
    exchange = Exchange()
    findings = group_findings(exchange)
    if exchange.rank == 0:
        print(render(findings), flush=True)
    dist.destroy_process_group()
    return any(each.is_wrong for each in findings)
