"""Measures what freezing brings and what it costs, two trainers in turns within one run.

- ``gain.py plain``: freezing.method none against plain TorchTitan, tokens/s.
- ``gain.py gain``: a method, timelyfreeze unless --method names another, against none. Gain,
  overhead and, where there is a plan, prediction and upper bound.
- ``gain.py solver``: time to build and to solve the linear program, and how good the plan is.

The first two start torchrun by themselves, 2 ranks with one thread each by default. Both trainers
of a pair live in the same processes and take turns, a few steps each, so that whatever else the
machine does hits both. Tables are printed as markdown; --json FILE keeps all values. Arguments
that are none of the benchmark's go to both trainers.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import (
    ROOT,
    SCHEDULES,
    command_of,
    environment,
    machine,
    require_pipeline,
    schedule_name,
)

from timelyfreeze.cli.options import (
    existing_file,
    new_file,
    status_of,
    whole,
)
from timelyfreeze.files import markdown_table, shown
from timelyfreeze.policies import parse_method
from timelyfreeze.settings import FIRST_STAGE_MODES

LP_SIZES = ["4x8", "8x32", "16x64", "16x128", "64x256"]


def main(arguments: Sequence[str]) -> int:
    """Run the chosen benchmark and print its table; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add, count = parser.add_argument, whole(1)
    add("what", choices=["plain", "gain", "solver"])
    add("--ranks", type=whole(2, 1024), default=2)
    add("--schedules", type=schedule_name, nargs="+", default=SCHEDULES)
    add("--method", type=_method, default="timelyfreeze", help="what gain compares with none")
    add("--first-stage", nargs="+", choices=FIRST_STAGE_MODES, default=["all_or_nothing"])
    add("--blocks", type=count, default=8, help="turns of each trainer")
    add("--steps", type=count, default=5, help="steps in a turn")
    add("--config", type=_config, default="train_configs/tiny_8m.toml")
    add("--sizes", nargs="+", default=LP_SIZES, help="RANKSxMICROBATCHES of solver")
    add("--repeats", type=whole(1, 1000), default=3, help="random durations for each of them")
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


def _config(text: str) -> str:
    return str(existing_file(str(ROOT / text)))


def _measure(options: argparse.Namespace, settings: list[str]) -> int:
    """Do what the options ask for.

    Raises:
        ValueError: If one of them is wrong.
    """
    if options.what == "solver":
        if settings:
            raise ValueError(f"{' '.join(settings)}: solver starts no trainer")
        cases = [(schedule, size) for schedule in options.schedules for size in options.sizes]
        for schedule, size in cases:
            require_pipeline(schedule, *_size(size), "--schedules, --sizes")
        rows = [time_solver(schedule, size, options.repeats) for schedule, size in cases]
    else:
        rows = [
            launch(options, schedule, first_stage, settings)
            for first_stage in (options.first_stage if options.what == "gain" else [""])
            for schedule in options.schedules
        ]
    print_table(rows)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=2) + "\n")
    return 0


def _size(text: str) -> tuple[int, int]:
    """Return the ranks and microbatches of, say, "16x64".

    Raises:
        ValueError: If the text is not of that form.
    """
    if not re.fullmatch(r"[0-9]{1,9}x[0-9]{1,9}", text):
        raise ValueError(f"--sizes has {shown(text)}; it must be RANKSxMICROBATCHES, such as 16x64")
    n_ranks, n_microbatches = map(int, text.split("x"))
    return n_ranks, n_microbatches


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print ``rows`` as a markdown table under the machine's description."""
    print(f"\n{machine()}\n")
    names = [name for name in rows[0] if not isinstance(rows[0][name], list)]
    print(markdown_table(names, [[str(row[name]) for name in names] for row in rows]))


def launch(
    options: argparse.Namespace, schedule: str, first_stage: str, settings: list[str]
) -> dict[str, Any]:
    """Run one pair of trainers under torchrun and return the row that its rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        task = {name: getattr(options, name) for name in ("method", "ranks", "blocks", "steps")}
        task |= {
            "kind": options.what,
            "schedule": schedule,
            "first_stage": first_stage,
            "config": options.config,
            "settings": settings,
            "folder": folder,
        }
        done = subprocess.run(
            command_of("gain_worker.py", options.ranks, task),
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
        )
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
