#!/usr/bin/env python3
"""Shows whether predictions hold on a machine that changes its speed: all is measured in turns.

    python benchmarks/prediction_turns.py run CONFIG.toml OUTPUT --pipelines emulated:4 real:2
        [--schedules GPipe 1F1B] [--r-max 0.3 0.8] [--rounds 30] [-- --section.key=value ...]
    python benchmarks/prediction_turns.py table OUTPUT

run    starts each pipeline with each schedule once. After its ramp it runs batches with nothing
       frozen, with everything frozen and under a plan for each cap, --batches of each in turn, of
       which the first is not counted. What OUTPUT already has is not run again. What follows --
       goes to the trainer.
table  predicts and compares (benchmarks/turn_times.py says how) what is in OUTPUT; goes to turns.md.

benchmarks/prediction_error.py compares a run's predictions, made while monitoring, with what the same
run measures afterwards.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from prediction_error import SCHEDULES
from prediction_jobs import EMULATED, Pipeline, parse_pipeline
from turn_times import (
    PASSES,
    Batches,
    Outcome,
    at_equal_speed,
    batches_from_json,
    outcome,
    resampled,
)

from timelyfreeze.cli.options import require, require_word
from timelyfreeze.compare.jobs import ROOT
from timelyfreeze.compare.launch import Starter, start

TABLE = "turns.md"
N_SAMPLES = 40


def main(arguments: Sequence[str], *, starter: Starter = start) -> int:
    """Run or table, and return the exit status."""
    arguments = list(arguments)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:split])
    try:
        failed = []
        if options.what == "run":
            failed = _run(options, arguments[split + 1 :], starter)
        _table(options.output)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True)
    run = commands.add_parser("run", help="make the batches, then the table")
    run.add_argument("config", type=Path, metavar="CONFIG", help="TOML file of all runs")
    run.add_argument("output", type=Path, metavar="OUTPUT", help="folder of all runs")
    run.add_argument("--pipelines", nargs="+", default=["emulated:4", "real:2"])
    run.add_argument("--schedules", nargs="+", default=[*SCHEDULES, "InterleavedZeroBubble"])
    run.add_argument("--r-max", nargs="+", type=float, default=[0.3, 0.5, 0.8])
    run.add_argument("--rounds", type=int, default=30)
    run.add_argument("--batches", type=int, default=2, help="of each mode in a round (default 2)")
    table = commands.add_parser("table", help="the table of batches that were made before")
    table.add_argument("output", type=Path, metavar="OUTPUT")
    return parser


def _run(options: argparse.Namespace, trainer: Sequence[str], starter: Starter) -> list[Path]:
    """Make the batches that are missing and return the folders of those that failed."""
    pipelines = [parse_pipeline(text) for text in options.pipelines]
    if not options.config.is_file():
        raise ValueError(f"CONFIG is {str(options.config)!r}; it must be a TOML file")
    require("--batches", options.batches, 2, 1e6)  # of which the first is not counted
    require("--rounds", options.rounds, 1, 1e6)
    # Imported late: it loads torch, for which a table need not wait.
    from timelyfreeze.runtime import known_schedules

    for cap in options.r_max:
        require("--r-max", cap, 0.0, 1.0)
    for schedule in options.schedules:
        require_word("--schedules", schedule, known_schedules())
    failed = []
    for schedule in options.schedules:
        for pipeline in pipelines:
            folder = options.output.resolve() / f"{pipeline.kind}_{pipeline.ranks}" / schedule
            if (folder / PASSES).exists():
                continue
            folder.mkdir(parents=True, exist_ok=True)
            print(f"{pipeline.name} {schedule} ...", end="", flush=True)
            began = time.perf_counter()
            task = {
                "config": str(options.config.resolve()),
                "folder": str(folder),
                "pipeline": pipeline.name,
                "schedule": schedule,
                "caps": options.r_max,
                "rounds": options.rounds,
                "batches": options.batches,
                "trainer": list(trainer),
            }
            status = starter(_command(pipeline, task), _environment(), folder / "train.log")
            print(f" {time.perf_counter() - began:.0f} s", flush=True)
            if status:
                print(f"failed with status {status}; see {folder / 'train.log'}", file=sys.stderr)
                failed.append(folder)
    return failed


def _command(pipeline: Pipeline, task: dict[str, Any]) -> list[str]:
    n_processes = 1 if pipeline.kind == EMULATED else pipeline.ranks
    return [
        sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={n_processes}",
        "--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0",
        str(ROOT / "benchmarks/prediction_worker.py"), json.dumps(task),
    ]  # fmt: skip


def _environment() -> dict[str, str]:
    # One thread, so that an emulated rank computes as a real one does.
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}


# -- the table -------------------------------------------------------------------------------------


def _table(output: Path) -> None:
    """Print the table of what is in ``output`` and keep it there."""
    files = sorted(output.rglob(PASSES))
    if not files:
        raise ValueError(f"no {PASSES} below {output}; `run` writes it")
    rows, everything = [], []
    for file in files:
        measured = batches_from_json(file.read_text())
        equal, drift = at_equal_speed(measured)
        for cap in measured.plans:
            with _quiet():
                found = outcome(equal, cap)
                rows.append(_row(measured, cap, drift, found, equal))
            everything.append((measured, cap, found))
    titles = (
        "pipeline | schedule | r_max | batches | drift | without: predicted | measured | error | "
        "with: predicted | measured | error | step with, error | gain predicted | measured | "
        "error as measured"
    )
    lines = [f"{everything[0][0].machine}", "", f"| {titles} |"]
    lines += ["|" + "---|" * 15, *rows, "", *_errors(everything)]
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


def _row(
    measured: Batches, cap: str, drift: Sequence[float], found: Outcome, equal: Batches
) -> str:
    again = resampled(equal, cap, N_SAMPLES)
    low, high = np.quantile([one.error for one in again], [0.05, 0.95])
    slow, slower = np.quantile(drift, [0.1, 0.9])
    raw = outcome(measured, cap)
    is_emulated = measured.pipeline.startswith(EMULATED)
    before_ms = found.unfrozen_ms if is_emulated else (0.0, found.unfrozen_step_ms)
    after_ms = found.batch_ms if is_emulated else found.step_ms
    gain = before_ms[1] / after_ms[1] - 1.0
    promised = found.unfrozen_ms[0] / found.batch_ms[0] - 1.0
    cells = [
        measured.pipeline,
        measured.schedule,
        cap,
        str(sum(turn.mode == cap for turn in measured.turns)),
        f"{slow:.2f}..{slower:.2f}",
        f"{found.unfrozen_ms[0]:.1f}",
        f"{found.unfrozen_ms[1]:.1f}",
        f"{found.unfrozen_error:+.1%}",
        f"{found.batch_ms[0]:.1f}",
        f"{found.batch_ms[1]:.1f}",
        f"{found.error:+.1%} ({low:+.1%}..{high:+.1%})",
        "-" if is_emulated else f"{found.step_error:+.1%}",
        f"{promised:+.1%}",
        f"{gain:+.1%}",
        f"{raw.error:+.1%}",
    ]
    return "| " + " | ".join(cells) + " |"


def _errors(rows: Sequence[tuple[Batches, str, Outcome]]) -> list[str]:
    lines = ["| pipeline | what | settings | median | worst | within 3% |", "|" + "---|" * 6]
    for pipeline in dict.fromkeys(batches.pipeline for batches, _, _ in rows):
        mine = [(p, cap, found) for p, cap, found in rows if p.pipeline == pipeline]
        kinds = {"batch without": "unfrozen_error", "batch with": "error"}
        if not pipeline.startswith(EMULATED):
            kinds["step with"] = "step_error"
        for title, name in kinds.items():
            errors = [getattr(found, name) for _, _, found in mine]
            worst = max(errors, key=abs)
            within = sum(abs(error) <= 0.03 for error in errors)
            middle = statistics.median(abs(error) for error in errors)
            lines.append(
                f"| {pipeline} | {title} | {len(errors)} | {middle:.1%} | {worst:+.1%} | "
                f"{within} of {len(errors)} |"
            )
    return lines


if __name__ == "__main__":
    # torchrun starts this file by its path, from the repository.
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
