"""The command ``python -m timelyfreeze plan``: what freezing would bring, told on a laptop."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from timelyfreeze.files import shown
from timelyfreeze.settings import ALL_OR_NOTHING, FIRST_STAGE_MODES, SKIP_INPUT_GRADS, USE
from timelyfreeze.whatif.answers import answer
from timelyfreeze.whatif.bounds_file import BoundsFile, read_bounds_file, recall
from timelyfreeze.whatif.grid import BEST_SPLIT, DEFAULT_SPLIT, Grid, Split
from timelyfreeze.whatif.report import render, title_of, to_csv, to_json

# Four times the largest pipeline that has been solved, 64 ranks and 256 microbatches.
_MOST_CELLS = 65536
_MOST_MS, _MOST_PASSES = 1e15, 10**9
PAPERS = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")


def add_plan_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``plan`` with its options to a parser's commands."""
    parser = commands.add_parser(
        "plan",
        help="what freezing would bring under other schedules, caps, microbatches and splits",
        description="Plans every combination of schedules, r_max, microbatches and splits from one "
        "file of measured bounds, which a training run or the profile has saved. Needs no device.",
    )
    parser.set_defaults(run=plan)
    parser.add_argument("bounds", type=Path, metavar="BOUNDS", help="bounds.json of a run")
    grid = parser.add_argument_group("the grid")
    grid.add_argument("--schedules", nargs="+", default=list(PAPERS), help="default: %(default)s")
    grid.add_argument(
        "--r-max", nargs="+", type=float, default=[0.8], metavar="R", help="default: %(default)s"
    )
    grid.add_argument(
        "--microbatches", nargs="+", type=int, metavar="M", help="default: as many as were measured"
    )
    grid.add_argument(
        "--splits",
        nargs="+",
        default=[DEFAULT_SPLIT],
        metavar="SPLIT",
        help=f"{DEFAULT_SPLIT}: as measured, or TorchTitan's cut for another number of stages; "
        f"{BEST_SPLIT}: the fastest without freezing; or layers of each stage, such as 9,8,8,7",
    )
    told = parser.add_argument_group("what the file may not say")
    told.add_argument("--ranks", type=int, metavar="N", help="pipeline ranks")
    told.add_argument("--layers", metavar="SPLIT", help="layers of each measured stage")
    told.add_argument(
        "--first-stage",
        choices=FIRST_STAGE_MODES,
        help=f"as freezing.first_stage; default: as the file says, or {ALL_OR_NOTHING}",
    )
    told.add_argument(
        "--skip_input_grads",
        choices=SKIP_INPUT_GRADS,
        help=f"as freezing.skip_input_grads; default: as the file says, or {USE}",
    )
    step = parser.add_argument_group("the machine and the step")
    step.add_argument(
        "--processors",
        type=float,
        metavar="N",
        help="ranks that compute at once, where they share a CPU's cores; default: as the file "
        "says, or all",
    )
    step.add_argument(
        "--message-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="overhead of a message between ranks, added to what was measured: a training run on "
        "real ranks measures it, a profile does not",
    )
    step.add_argument(
        "--batches", type=int, default=1, metavar="N", help="pipeline batches in an optimizer step"
    )
    step.add_argument(
        "--outside-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="time of a step outside of its batches: optimizer, clipping, data",
    )
    step.add_argument(
        "--time-limit-s", type=float, default=60.0, metavar="S", help="for the solver, each case"
    )
    files = parser.add_argument_group("files")
    files.add_argument("--json", type=Path, metavar="FILE", help="everything, for programs")
    files.add_argument("--csv", type=Path, metavar="FILE", help="a row for each case")


def plan(options: argparse.Namespace) -> int:
    """Plan what the options ask for; return the exit status."""
    try:
        file = read_bounds_file(options.bounds)
        grid = _grid(options, file)
        layers = None if options.layers is None else _layers("--layers", options.layers)
        recalled = recall(file, file.notes.processors)
        found = answer(file, grid, layers)
        print(render(found, title_of(file, grid, recalled)))
        if options.json is not None:
            _write(options.json, to_json(found, file, grid, recalled))
        if options.csv is not None:
            _write(options.csv, to_csv(found))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _grid(options: argparse.Namespace, file: BoundsFile) -> Grid:
    """Check the options and fill in what the file says."""
    n_ranks = options.ranks or file.n_ranks
    if n_ranks is None:
        raise ValueError(
            f"{file.path} does not say how many ranks its {file.n_stages} stages are on, and no "
            "schedule.csv lies beside it; tell with --ranks"
        )
    _check(n_ranks >= 2, "--ranks", n_ranks, "a pipeline has 2 or more")
    for cap in options.r_max:
        _check(0.0 <= cap <= 1.0, "--r-max", cap, "it must lie in [0, 1]")
    for n in options.microbatches or ():
        _check(n >= 1, "--microbatches", n, "it must be 1 or more")
    largest = max(options.microbatches or (file.n_microbatches,))
    if n_ranks * largest > _MOST_CELLS:
        raise ValueError(
            f"{n_ranks} ranks and {largest} microbatches (--ranks, --microbatches): their product "
            f"must be at most {_MOST_CELLS}"
        )
    for key in ("message_ms", "outside_ms"):
        value = getattr(options, key)
        name = f"--{key.replace('_', '-')}"
        _check(0.0 <= value <= _MOST_MS, name, value, f"it must lie in [0, {_MOST_MS:g}]")
    rule = f"it must lie in [1, {_MOST_PASSES}]"
    _check(1 <= options.batches <= _MOST_PASSES, "--batches", options.batches, rule)
    _check(options.time_limit_s > 0, "--time-limit-s", options.time_limit_s, "it must be above 0")
    if options.processors is not None:
        _check(options.processors > 0, "--processors", options.processors, "it must be above 0")
    named = (DEFAULT_SPLIT, BEST_SPLIT)
    return Grid(
        schedules=tuple(options.schedules),
        caps=tuple(options.r_max),
        microbatches=tuple(options.microbatches or (file.n_microbatches,)),
        splits=tuple(s if s in named else _layers("--splits", s) for s in options.splits),
        n_ranks=n_ranks,
        first_stage=options.first_stage or file.notes.first_stage or ALL_OR_NOTHING,
        skip_input_grads=options.skip_input_grads or file.notes.skip_input_grads or USE,
        n_processors=options.processors or file.notes.processors,
        message_ms=options.message_ms,
        batches=options.batches,
        outside_ms=options.outside_ms,
        time_limit_s=options.time_limit_s,
    )


def _check(is_right: bool, name: str, value: object, rule: str) -> None:
    if not is_right:
        raise ValueError(f"{name} is {shown(value)}; {rule}")


def _layers(name: str, text: str) -> Split:
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise ValueError(
            f"{name} has {text!r}; layers of each stage are whole numbers with commas in between, "
            "such as 9,8,8,7"
            + (f", or it is {DEFAULT_SPLIT} or {BEST_SPLIT}" if name == "--splits" else "")
        )
    return tuple(int(word) for word in words)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error
