"""Measures what freezing brings and what it costs, two trainers in turns within one run.

- ``gain.py plain``: freezing.method none against plain TorchTitan, tokens/s.
- ``gain.py gain``: a method, timelyfreeze unless --method names another, against none. Gain and,
  where there is a plan, prediction and upper bound.

Both start torchrun by themselves, 2 ranks with one thread each by default. Both trainers
of a pair live in the same processes and take turns, a few steps each, so that whatever else the
machine does hits both. Tables are printed as markdown. Arguments that are none of the benchmark's
go to both trainers.
"""

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

from timelyfreeze.cli import run_environment
from timelyfreeze.files import markdown_table
from timelyfreeze.files.options import existing_file, status_of, whole, wrong
from timelyfreeze.policies import parse_method
from timelyfreeze.settings import FIRST_STAGE_MODES

ROOT = Path(__file__).resolve().parents[1]
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"]


def main(arguments: Sequence[str]) -> int:
    """Run the chosen benchmark and print its table; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add, count = parser.add_argument, whole(1)
    add("what", choices=["plain", "gain"])
    add("--ranks", type=whole(2, 1024), default=2)
    add("--schedules", type=_schedule, nargs="+", default=SCHEDULES)
    add("--method", type=_method, default="timelyfreeze", help="what gain compares with none")
    add("--first-stage", nargs="+", choices=FIRST_STAGE_MODES, default=["all_or_nothing"])
    add("--blocks", type=count, default=8, help="turns of each trainer")
    add("--steps", type=count, default=5, help="steps in a turn")
    in_root = "train_configs/tiny_8m.toml"
    add("--config", type=lambda text: existing_file(str(ROOT / text)), default=in_root)
    options, settings = parser.parse_known_args(arguments)
    return status_of(lambda: _measure(options, settings))


def _schedule(text: str) -> str:
    # Imported late: it loads torch, which --help does without.
    from timelyfreeze.runtime import SCHEDULES

    if text not in SCHEDULES:
        raise wrong(text, f"must be one of {', '.join(SCHEDULES)}")
    return text


def _method(text: str) -> str:
    try:
        method = parse_method(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if method is None:
        raise argparse.ArgumentTypeError("none is what the method is compared with")
    return text


def _measure(options: argparse.Namespace, settings: list[str]) -> int:
    rows = [
        launch(options, schedule, first_stage, settings)
        for first_stage in (options.first_stage if options.what == "gain" else [""])
        for schedule in options.schedules
    ]
    names = list(rows[0])
    table = markdown_table(names, [[str(row[name]) for name in names] for row in rows])
    print(f"\n{machine()}\n\n{table}")
    return 0


def launch(
    options: argparse.Namespace, schedule: str, first_stage: str, settings: list[str]
) -> dict[str, Any]:
    """Run one pair of trainers under torchrun and return the row that its rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        task = {
            name: getattr(options, name) for name in ("what", "method", "ranks", "blocks", "steps")
        }
        task |= {"schedule": schedule, "first_stage": first_stage}
        task |= {"settings": settings, "folder": folder, "config": str(options.config)}
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={options.ranks}",
            "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0",
            str(ROOT / "benchmarks/gain_worker.py"), json.dumps(task),
        ]  # fmt: skip
        # One thread each, as an emulated rank has.
        env = run_environment({"OMP_NUM_THREADS": "1", **os.environ}, options.ranks)
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{schedule} failed:\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}")
        row: dict[str, Any] = json.loads((Path(folder) / "row.json").read_text())
    print(json.dumps(row), flush=True)
    return row


def machine() -> str:
    """Return what the times were measured on."""
    import torch

    from torchtitan.upstream.cpu_device import CpuDevice

    device = torch.cuda if torch.cuda.is_available() else CpuDevice
    return (
        f"{device.get_device_name()}, {os.cpu_count()} cores, {platform.system()}, "
        f"torch {torch.__version__}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
