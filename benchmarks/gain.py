"""Measures what freezing brings and what it costs, two trainers in turns within one run.

- ``benchmark.py plain``: freezing.method none against plain TorchTitan, tokens/s.
- ``benchmark.py gain``: a method, timelyfreeze unless --method names another, against none. Gain,
  overhead and, where there is a plan, prediction and limit.
- ``benchmark.py solver``: time to build and to solve the linear program, and how good the plan is.

The first two start torchrun by themselves, 2 ranks with one thread each by default. Both trainers
of a pair live in the same processes and take turns, a few steps each, so that whatever else the
machine does hits both. Tables are printed as markdown; --json FILE keeps all metrics. Arguments
that are none of the benchmark's go to both trainers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

from timelyfreeze.cli.options import (  # noqa: E402
    require,
    require_file,
    require_pipeline,
    require_place,
    require_word,
    status_of,
)
from timelyfreeze.files import shown
from timelyfreeze.policies import parse_method
from timelyfreeze.settings import FIRST_STAGE_MODES

SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"]
LP_SIZES = ["4x8", "8x32", "16x64", "16x128", "64x256"]


def main(arguments: Sequence[str]) -> int:
    """Run the chosen benchmark and print its table; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=["plain", "gain", "solver"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES)
    parser.add_argument("--method", default="timelyfreeze", help="what gain compares with none")
    parser.add_argument("--first-stage", nargs="+", default=["all_or_nothing"])
    parser.add_argument("--blocks", type=int, default=8, help="turns of each trainer")
    parser.add_argument("--steps", type=int, default=5, help="steps in a turn")
    parser.add_argument("--config", default="train_configs/tiny_8m.toml")
    parser.add_argument("--sizes", nargs="+", default=LP_SIZES, help="RANKSxMICROBATCHES of solver")
    parser.add_argument("--repeats", type=int, default=3, help="random durations for each of them")
    parser.add_argument("--json", type=Path)
    options, settings = parser.parse_known_args(arguments)
    return status_of(lambda: _measure(options, settings))


def _measure(options: argparse.Namespace, settings: list[str]) -> int:
    """Do what the options ask for.

    Raises:
        ValueError: If one of them is wrong.
    """
    _check(options, settings)
    if options.what == "solver":
        rows = [
            time_solver(schedule, size, options.repeats)
            for schedule in options.schedules
            for size in options.sizes
        ]
    elif options.what == "plain":
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
    """Raise if an option is wrong, before torchrun starts or minutes of solving.

    Raises:
        ValueError: Naming option, value and rule.
    """
    if options.json is not None:
        require_place("--json", options.json, is_folder=False)
    if options.what == "solver":
        if settings:
            raise ValueError(f"{' '.join(settings)}: solver starts no trainer")
        require("--repeats", options.repeats, 1, 1000)
        for schedule in options.schedules:
            for size in options.sizes:
                require_pipeline(schedule, *_size(size), "--schedules, --sizes")
        return
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


def _size(text: str) -> tuple[int, int]:
    """Return the ranks and microbatches of, say, "16x64".

    Raises:
        ValueError: If the text is not of that form.
    """
    if not re.fullmatch(r"[0-9]{1,9}x[0-9]{1,9}", text):
        raise ValueError(f"--sizes has {shown(text)}; it must be RANKSxMICROBATCHES, such as 16x64")
    n_ranks, n_microbatches = map(int, text.split("x"))
    return n_ranks, n_microbatches


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


# -- the linear program ----------------------------------------------------------------------------


def time_solver(schedule: str, size: str, repeats: int) -> dict[str, Any]:
    """Return times for a schedule whose durations vary by 5%, and how good the plans are.

    Times are processor times, so that they hold on a machine that does other things as well; the
    solvers compute on one thread. The lower bound comes from the interior-point method, whichever
    solver made the plan.
    """
    from solver_cases import MAX_FREEZE_RATIO, make_case

    from timelyfreeze.planning import build_lp, solve_freeze_ratios
    from timelyfreeze.planning.interior.solver import solve_certified

    seconds: dict[str, list[float]] = {"build": [], "solve": []}
    above, steps = [], []
    for seed in range(repeats):
        case = make_case(schedule, *_size(size), seed=seed)
        started = time.process_time()
        build_lp(case.dag, case.bounds, MAX_FREEZE_RATIO)
        seconds["build"].append(time.process_time() - started)
        started = time.process_time()
        plan = solve_freeze_ratios(
            case.dag, case.bounds, max_freeze_ratio=MAX_FREEZE_RATIO, time_limit_s=600.0
        )
        seconds["solve"].append(time.process_time() - started)
        inside = solve_certified(case.lp, 600.0)
        above.append(plan.batch_ms / case.lp.scale_ms / inside.bound - 1.0)
        steps.append(inside.n_steps)
    row: dict[str, Any] = {"schedule": schedule, "ranks x microbatches": size}
    row |= {"actions": len(case.dag.actions), "rows": len(case.lp.row_lower)}
    for name, values in seconds.items():
        middle = statistics.median(values)
        row[f"{name}, s (min..max)"] = f"{middle:.3f} ({min(values):.3f}..{max(values):.3f})"
    row["steps from the inside"] = statistics.median(steps)
    row["above the lower bound, at most"] = f"{max(above):.4%}"
    return row


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
