"""Solvers of the freeze-ratio program of large pipelines, timed and held to a lower bound.

    python benchmarks/solver_tries.py --schedules 1F1B --sizes 16x128 64x256 --limit 400

For each pipeline and solver: seconds, how far the batch is above the lower bound, and the mean
freeze ratio. ``plan`` is what the library does, ``clarabel`` what it uses for large pipelines and
``simplex`` for small ones; ``IPM`` is HiGHS' interior-point method without crossover. Durations:
F = dX = dW with noise. Seconds are processor time of one thread, so that they hold on a machine
that does other things as well. Each solver runs in a process of its own, which the system ends at
the limit: HiGHS counts time on the wall, and does not always look at it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray
from processes import new_file

from timelyfreeze.cli.plan import MAX_CELLS
from timelyfreeze.files import markdown_lines, shown
from timelyfreeze.files.options import number, status_of, whole
from timelyfreeze.planning import FreezeLp, build_lp, solve_freeze_ratios
from timelyfreeze.planning import simplex as highs
from timelyfreeze.planning.interior_point import (
    solve_by_interior_point,
    solve_certified,
    weighted_cost,
)
from timelyfreeze.runtime import SCHEDULES, named_order, stages_per_rank
from timelyfreeze.schedule import PipelineDag, build_dag, makespan
from timelyfreeze.timing import DurationBounds

Floats = NDArray[np.float64]

MAX_FREEZE_RATIO = 0.8
_NO_LIMIT = 1e9
_MEASURED = ("s", "batch", "above", "mean ratio")
TITLES = ("pipeline", "seed", "actions", "rows", "solver", *_MEASURED)


@dataclass(frozen=True, eq=False)
class Case:
    """A pipeline with noisy durations, and its program with ``MAX_FREEZE_RATIO``."""

    dag: PipelineDag
    bounds: DurationBounds
    lp: FreezeLp

    def batch_ms(self, ratios: Floats) -> float:
        """Return the batch time with ratios, shape [R]; a solver's may lie just outside [0, 1]."""
        durations = self.bounds.max_ms.copy()
        saved = (self.bounds.max_ms - self.bounds.min_ms)[self.lp.freezable]
        durations[self.lp.freezable] -= np.clip(ratios, 0.0, 1.0) * saved
        return makespan(self.dag, durations)


def make_case(
    schedule: str, n_ranks: int, n_microbatches: int, seed: int = 0, noise: float = 0.05
) -> Case:
    """Return a pipeline of ``schedule`` with as few stages per rank as it can have.

    F, dX and dW are equally long, up to noise: without it very many plans are equally good. Frozen,
    a backward keeps dX, but for the first stage's, of which nothing is left.
    """
    n_stages = stages_per_rank(schedule)
    if n_stages is None:
        raise ValueError(f"{schedule!r} is no schedule that torch can build")
    dag = build_dag(named_order(schedule, n_ranks, n_microbatches, stages_per_rank=n_stages))
    rng = np.random.default_rng(seed)
    kind = np.array([action.kind.value for action in dag.actions])
    longest = np.where(kind == "B", 2.0, 1.0) * rng.normal(1.0, noise, len(dag.actions))
    left = np.where((kind == "W") | (dag.stages == 0), 0.0, 0.5)
    bounds = DurationBounds(np.where(dag.freezable, longest * left, longest), longest)
    return Case(dag, bounds, build_lp(dag, bounds, MAX_FREEZE_RATIO))


def _plan(case: Case) -> Floats:
    plan = solve_freeze_ratios(
        case.dag, case.bounds, max_freeze_ratio=MAX_FREEZE_RATIO, time_limit_s=_NO_LIMIT
    )
    return plan.ratios[case.lp.freezable]


def _ipm(case: Case) -> Floats:
    solver = highs.load(case.lp, _NO_LIMIT)
    solver.setOptionValue("solver", "ipx")
    solver.setOptionValue("run_crossover", "off")
    cost = weighted_cost(case.lp, makespan(case.dag, case.bounds.max_ms) / case.lp.scale_ms)
    highs.minimise(solver, case.lp, cost, "batch time and freezing")
    return np.array(solver.getSolution().col_value)[case.lp.n_actions + 1 :]


WAYS: dict[str, Callable[[Case], Floats]] = {
    "plan": _plan,
    "clarabel": lambda case: solve_by_interior_point(case.lp, _NO_LIMIT),
    "simplex": lambda case: highs.solve_by_simplex(case.lp, _NO_LIMIT),
    "IPM": _ipm,
}


def _attempt(way: str, case: Case, limit_s: float, answer: Connection) -> None:
    spent = int(time.process_time() + limit_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (spent, spent))
    started = time.process_time()
    ratios = WAYS[way](case)
    answer.send((time.process_time() - started, case.batch_ms(ratios), float(ratios.mean())))


def time_ways(case: Case, ways: Sequence[str], limit_s: float) -> list[dict[str, Any]]:
    """Return a row for each way: seconds, the batch above the lower bound, mean freeze ratio."""
    bound_ms = solve_certified(case.lp, _NO_LIMIT).bound * case.lp.scale_ms
    rows: list[dict[str, Any]] = []
    for way in ways:
        here, there = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.Process(target=_attempt, args=(way, case, limit_s, there))
        process.start()
        process.join()
        found: tuple[Any, ...] = (f"no answer in {limit_s:g}", "", "", "")
        if here.poll():
            seconds, batch_ms, mean = here.recv()
            found = f"{seconds:.3f}", batch_ms, f"{batch_ms / bound_ms - 1.0:.4%}", mean
        size = {"actions": len(case.dag.actions), "rows": len(case.lp.row_lower), "solver": way}
        rows.append(size | dict(zip(_MEASURED, found, strict=True)))
    return rows


def main(arguments: Sequence[str]) -> int:
    """Print a table row for each pipeline, seed and solver; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add, seconds = parser.add_argument, number(0, 1e6, above=True)
    add("--schedules", nargs="+", default=["1F1B"])
    add("--sizes", nargs="+", default=["16x64"], help="RANKSxMICROBATCHES")
    add("--repeats", type=whole(1, 1000), default=1, help="random durations for each of them")
    add("--noise", type=number(0, 0.2), default=0.05, help="more would make times negative")
    add("--limit", type=seconds, default=60.0, help="seconds for each solver")
    add("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    add("--json", type=new_file)
    options = parser.parse_args(arguments)
    return status_of(lambda: _try(options))


def _try(options: argparse.Namespace) -> int:
    pipelines = [(name, *_size(size)) for name in options.schedules for size in options.sizes]
    for pipeline in pipelines:
        _require_pipeline(*pipeline)
    kept: list[dict[str, Any]] = []

    def rows() -> Iterator[list[str]]:
        for pipeline, seed in itertools.product(pipelines, range(options.repeats)):
            case = make_case(*pipeline, seed, options.noise)
            for row in time_ways(case, options.ways, options.limit):
                kept.append({"pipeline": "{} {}x{}".format(*pipeline), "seed": seed, **row})
                yield [str(value) for value in kept[-1].values()]

    for line in markdown_lines(TITLES, rows()):
        print(line, flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(kept, indent=2) + "\n")
    return 0


def _require_pipeline(schedule: str, n_ranks: int, n_microbatches: int) -> None:
    """Raise unless there can be such a pipeline, and its program can be solved."""
    names = [name for name in SCHEDULES if stages_per_rank(name) is not None]
    if schedule not in names:
        raise ValueError(f"--schedules has {shown(schedule)}; known: {', '.join(names)}")
    if min(n_ranks, n_microbatches) < 1 or n_ranks * n_microbatches > MAX_CELLS:
        raise ValueError(
            f"--schedules, --sizes: {n_ranks} ranks and {n_microbatches} microbatches; each must "
            f"be 1 or more, and their product at most {MAX_CELLS}"
        )


def _size(text: str) -> tuple[int, int]:
    """Return the ranks and microbatches of, say, "16x64"."""
    if not re.fullmatch(r"[0-9]{1,9}x[0-9]{1,9}", text):
        raise ValueError(f"--sizes has {shown(text)}; it must be RANKSxMICROBATCHES, such as 16x64")
    n_ranks, n_microbatches = map(int, text.split("x"))
    return n_ranks, n_microbatches


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
