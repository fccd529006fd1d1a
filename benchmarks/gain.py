"""Measures what freezing brings and what it costs, two trainers in turns within one run.

- ``gain.py plain``: freezing.method none against plain TorchTitan, tokens/s.
- ``gain.py gain``: a method, timelyfreeze unless --method names another, against none. Gain,
  overhead and, where there is a plan, prediction and upper bound.

Both start torchrun by themselves, 2 ranks with one thread each by default. Both trainers
of a pair live in the same processes and take turns, a few steps each, so that whatever else the
machine does hits both. Tables are printed as markdown; --json FILE keeps all values. Arguments
that are none of the benchmark's go to both trainers.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import ROOT, SCHEDULES, command_of, environment, machine, new_file, schedule_name

from timelyfreeze.files import markdown_table
from timelyfreeze.files.options import existing_file, status_of, whole
from timelyfreeze.policies import parse_method
from timelyfreeze.settings import FIRST_STAGE_MODES


def main(arguments: Sequence[str]) -> int:
    """Run the chosen benchmark and print its table; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add, count = parser.add_argument, whole(1)
    add("what", choices=["plain", "gain"])
    add("--ranks", type=whole(2, 1024), default=2)
    add("--schedules", type=schedule_name, nargs="+", default=SCHEDULES)
    add("--method", type=_method, default="timelyfreeze", help="what gain compares with none")
    add("--first-stage", nargs="+", choices=FIRST_STAGE_MODES, default=["all_or_nothing"])
    add("--blocks", type=count, default=8, help="turns of each trainer")
    add("--steps", type=count, default=5, help="steps in a turn")
    in_root = "train_configs/tiny_8m.toml"
    add("--config", type=lambda text: existing_file(str(ROOT / text)), default=in_root)
    add("--json", type=new_file)
    options, settings = parser.parse_known_args(arguments)
    return status_of(lambda: _measure(options, settings))


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
    names = list(_cells(rows[0]))
    table = markdown_table(names, [[str(row[name]) for name in names] for row in rows])
    print(f"\n{machine()}\n\n{table}")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")
    return 0


def _cells(row: dict[str, Any]) -> dict[str, Any]:
    """Return what of a row is printed; the ratio of each turn is not."""
    return {name: value for name, value in row.items() if not isinstance(value, list)}


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
        done = subprocess.run(
            command_of("gain_worker.py", options.ranks, task),
            cwd=ROOT,
            env=environment(options.ranks),
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(f"{schedule} failed:\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}")
        row: dict[str, Any] = json.loads((Path(folder) / "row.json").read_text())
    print(json.dumps(_cells(row)), flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
