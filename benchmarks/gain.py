"""Measures what freezing brings and what it costs, two trainers in turns within one run.

- ``gain.py plain``: freezing.method none against plain TorchTitan, tokens/s.
- ``gain.py gain``: a method, timelyfreeze unless --method names another, against none. Gain,
  overhead and, where there is a plan, prediction and upper bound.

Both start torchrun by themselves, 2 ranks with one thread each by default. Both trainers of a pair
live in the same processes and take turns, a few steps each, so that whatever else the machine does
hits both. Tables are printed as markdown; --json FILE keeps all metrics. Arguments that are none of
the benchmark's go to both trainers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

from timelyfreeze.cli.options import (  # noqa: E402
    require,
    require_file,
    require_place,
    require_word,
    status_of,
)
from timelyfreeze.policies import parse_method  # noqa: E402
from timelyfreeze.settings import FIRST_STAGE_MODES  # noqa: E402

SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"]


def main(arguments: Sequence[str]) -> int:
    """Run the chosen benchmark and print its table; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=["plain", "gain"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES)
    parser.add_argument("--method", default="timelyfreeze", help="what gain compares with none")
    parser.add_argument("--first-stage", nargs="+", default=["all_or_nothing"])
    parser.add_argument("--blocks", type=int, default=8, help="turns of each trainer")
    parser.add_argument("--steps", type=int, default=5, help="steps in a turn")
    parser.add_argument("--config", default="train_configs/tiny_8m.toml")
    parser.add_argument("--json", type=Path)
    options, settings = parser.parse_known_args(arguments)
    return status_of(lambda: _measure(options, settings))


def _measure(options: argparse.Namespace, settings: list[str]) -> int:
    """Do what the options ask for.

    Raises:
        ValueError: If one of them is wrong.
    """
    _check(options, settings)
    if options.what == "plain":
        rows = [launch(options, "plain", schedule, "", settings) for schedule in options.schedules]
    else:
        rows = [
            launch(options, "gain", schedule, first_stage, settings)
            for first_stage in options.first_stage
            for schedule in options.schedules
        ]
    print_table(rows)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")
    return 0


def _check(options: argparse.Namespace, settings: list[str]) -> None:
    """Raise if an option is wrong, before torchrun starts.

    Raises:
        ValueError: Naming option, value and rule.
    """
    if options.json is not None:
        require_place("--json", options.json, is_folder=False)
    # Imported late: it loads torch, for which --help need not wait.
    from timelyfreeze.runtime import known_schedules

    require("--ranks", options.ranks, 2, 1024)
    require("--blocks", options.blocks, 1, 10**6)
    require("--steps", options.steps, 1, 10**6)
    require_file("--config", ROOT / options.config)
    for schedule in options.schedules:
        require_word("--schedules", schedule, known_schedules())
    for first_stage in options.first_stage:
        require_word("--first-stage", first_stage, FIRST_STAGE_MODES)
    try:
        method = parse_method(options.method)
    except ValueError as error:
        raise ValueError(f"--method: {error}") from error
    if method is None:
        raise ValueError("--method is none, with which the other is compared")


def machine() -> str:
    """Return what the metrics were measured on."""
    import torch

    from torchtitan.upstream.cpu_device import CpuDevice

    name = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else CpuDevice.get_device_name()
    )
    return f"{name}, {os.cpu_count()} cores, {platform.system()}, torch {torch.__version__}"


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print ``rows`` as a markdown table under the machine's description."""
    print(f"\n{machine()}\n")
    names = [name for name in rows[0] if not isinstance(rows[0][name], list)]
    print("| " + " | ".join(names) + " |\n|" + " --- |" * len(names))
    for row in rows:
        print("| " + " | ".join(str(row[name]) for name in names) + " |")


def launch(
    options: argparse.Namespace, kind: str, schedule: str, first_stage: str, settings: list[str]
) -> dict[str, Any]:
    """Run one pair of trainers under torchrun and return the row that its rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        task = {
            "kind": kind,
            "schedule": schedule,
            "method": options.method,
            "first_stage": first_stage,
            "ranks": options.ranks,
            "blocks": options.blocks,
            "steps": options.steps,
            "config": options.config,
            "settings": settings,
            "folder": folder,
        }
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={options.ranks}",
            "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0",
            str(ROOT / "benchmarks/benchmark_worker.py"), json.dumps(task),
        ]  # fmt: skip
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{schedule} failed:\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}")
        row: dict[str, Any] = json.loads((Path(folder) / "row.json").read_text())
    print(json.dumps({k: v for k, v in row.items() if not isinstance(v, list)}), flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
