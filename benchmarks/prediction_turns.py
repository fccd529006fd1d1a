#!/usr/bin/env python3
"""Shows whether predictions hold on a machine that changes its speed: all is measured in turns.

    python benchmarks/prediction_turns.py run CONFIG.toml OUTPUT --pipelines emulated:4 real:2
        [--schedules GPipe 1F1B] [--r-max 0.3 0.8] [--rounds 30] [-- --section.key=value ...]
    python benchmarks/prediction_turns.py table OUTPUT

run    starts each pipeline with each schedule once. After its ramp it runs batches with nothing
       frozen, with everything frozen and under a plan for each cap, --batches of each in turn, of
       which the first is not counted. What OUTPUT already has is not run again. What follows --
       goes to the trainer.
table  predicts and compares (turn_times.py says how) what is in OUTPUT; goes to turns.md.

prediction_error.py compares a run's predictions, made while monitoring, with what the same run
measures afterwards.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
from prediction_error import add_run_options
from prediction_table import error_cells, excess
from processes import SCHEDULES, command_of, environment, schedule_name
from turn_times import (
    BATCHES,
    Batches,
    Outcome,
    at_equal_speed,
    batches_from_json,
    outcome,
    resampled,
)

from timelyfreeze.compare.runs.jobs import Starter, start
from timelyfreeze.files import markdown_table
from timelyfreeze.files.options import parse_with_keys, status_of, whole

TABLE = "turns.md"
N_SAMPLES = 40
TITLES = [
    "pipeline", "schedule", "r_max", "batches", "drift", "without: predicted", "measured", "error",
    "with: predicted", "measured", "error", "step with, error", "gain predicted", "measured",
    "error as measured",
]  # fmt: skip


def main(arguments: Sequence[str], *, starter: Starter = start) -> int:
    """Run or table, and return the exit status."""
    options, trainer_arguments = parse_with_keys(_parser(), arguments)

    def work() -> int:
        failed = options.what == "run" and _run(options, trainer_arguments, starter)
        with _quiet():
            _table(options.output)
        return 1 if failed else 0

    return status_of(work)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    run = commands.add_parser("run", help="make the batches, then the table")
    add_run_options(run)
    schedules = [*SCHEDULES, "InterleavedZeroBubble"]
    run.add_argument("--schedules", type=schedule_name, nargs="+", default=schedules)
    run.add_argument("--rounds", type=whole(1), default=30)
    # The first of them is not counted.
    run.add_argument("--batches", type=whole(2), default=2, help="of each mode in a round")
    table = commands.add_parser("table", help="the table of batches that were made before")
    table.add_argument("output", type=Path, metavar="OUTPUT")
    return parser


def _run(options: argparse.Namespace, trainer: Sequence[str], starter: Starter) -> bool:
    """Make the batches that are missing; return whether one of them failed."""
    if not options.config.is_file():
        raise ValueError(f"CONFIG is {str(options.config)!r}; it must be a TOML file")
    failed = False
    for schedule in options.schedules:
        for pipeline in options.pipelines:
            folder = options.output.resolve() / pipeline.folder / schedule
            if (folder / BATCHES).exists():
                continue
            folder.mkdir(parents=True, exist_ok=True)
            print(f"{pipeline.name} {schedule} ...", end="", flush=True)
            began = time.perf_counter()
            task = {
                "config": str(options.config.resolve()), "folder": str(folder),
                "pipeline": pipeline.name, "schedule": schedule, "caps": options.r_max,
                "rounds": options.rounds, "batches": options.batches, "trainer": list(trainer),
            }  # fmt: skip
            command = command_of("prediction_worker.py", pipeline.n_processes, task)
            log, variables = folder / "train.log", environment(pipeline.n_processes)
            status = starter(command, variables, log)
            print(f" {time.perf_counter() - began:.0f} s", flush=True)
            if status:
                print(f"failed with status {status}; see {log}", file=sys.stderr)
                failed = True
    return failed


def _table(output: Path) -> None:
    """Print the table of what is in ``output`` and keep it there."""
    files = sorted(output.rglob(BATCHES))
    if not files:
        raise ValueError(f"no {BATCHES} below {output}; `run` writes it")
    rows: list[list[str]] = []
    errors: list[tuple[str, str, float | None]] = []
    for file in files:
        measured = batches_from_json(file.read_text())
        equal, drift = at_equal_speed(measured)
        for cap in measured.plans:
            found = outcome(equal, cap)
            rows.append(_row(measured, equal, cap, found, drift))
            kinds = {"batch without": found.unfrozen_ms.error, "batch with": found.batch_ms.error}
            if not _is_emulated(measured):
                kinds["step with"] = found.step_ms.error
            errors += [(measured.pipeline, what, error) for what, error in kinds.items()]
    groups = pd.DataFrame(errors).groupby([0, 1], sort=False)[2]
    summary = [[*what, *error_cells(group)] for what, group in groups]
    names = ["pipeline", "what", "settings", "median", "worst", "within 3%"]
    lines = [measured.machine, "", markdown_table(TITLES, rows), "", markdown_table(names, summary)]
    text = "\n".join(lines) + "\n"
    print(f"\n{text}", end="")
    (output / TABLE).write_text(text)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings back: bounds of a few rounds may cross, and are made a hundred times over."""
    logger = logging.getLogger("timelyfreeze")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _is_emulated(batches: Batches) -> bool:
    return batches.pipeline.startswith("emulated")


def _row(
    measured: Batches, equal: Batches, cap: str, found: Outcome, drift: Sequence[float]
) -> list[str]:
    again = [one.batch_ms.error for one in resampled(equal, cap, N_SAMPLES)]
    low, high = np.quantile(again, [0.05, 0.95])
    slow, slower = np.quantile(drift, [0.1, 0.9])
    is_emulated = _is_emulated(measured)
    before_ms = found.unfrozen_ms.measured if is_emulated else found.unfrozen_step_ms
    after_ms = (found.batch_ms if is_emulated else found.step_ms).measured
    n_batches = str(len(measured.times_ms.loc[cap]))
    return [
        *(measured.pipeline, measured.schedule, cap, n_batches, f"{slow:.2f}..{slower:.2f}"),
        *(f"{ms:.1f}" for ms in found.unfrozen_ms),
        f"{found.unfrozen_ms.error:+.1%}",
        *(f"{ms:.1f}" for ms in found.batch_ms),
        f"{found.batch_ms.error:+.1%} ({low:+.1%}..{high:+.1%})",
        "-" if is_emulated else f"{found.step_ms.error:+.1%}",
        f"{excess(found.unfrozen_ms.predicted, found.batch_ms.predicted):+.1%}",
        f"{excess(before_ms, after_ms):+.1%}",
        f"{outcome(measured, cap).batch_ms.error:+.1%}",
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
