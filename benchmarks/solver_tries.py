"""Ways to solve the freeze-ratio program of a large pipeline, each timed and held to the optimum.

    PYTHONPATH=. python benchmarks/solver_tries.py --ranks 16 --microbatches 128 --limit 120

For each way: seconds, how far the batch is above a lower bound (the certificate of the
interior-point method), and the mean freeze ratio. ``inside`` is what the library uses for large
pipelines and ``simplex`` what it uses for small ones. The others are here to be looked at again
when solvers or machines have changed. Times are processor times of one thread, so that they hold on
a machine that does other things as well. Each way runs in a process of its own, which the system
ends at the limit: HiGHS counts time on the wall, and does not always look at it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection

import highspy
import numpy as np
from numpy.typing import NDArray
from processes import require_pipeline
from solver_cases import Case, make_case, schedule_dag

from timelyfreeze.cli.options import require, status_of
from timelyfreeze.files import markdown_lines
from timelyfreeze.planning import FreezeLp, build_lp
from timelyfreeze.planning import simplex as lp_simplex
from timelyfreeze.planning.interior.solver import (
    FREEZING_PRICE,
    solve_by_interior_point,
    solve_certified,
)
from timelyfreeze.schedule import critical_path, makespan
from timelyfreeze.timing import DurationBounds

Floats = NDArray[np.float64]
Way = Callable[[Case, float], Floats]

_NO_LIMIT = 1e9


def inside(case: Case, limit_s: float) -> Floats:
    """Our interior-point method."""
    return solve_by_interior_point(case.lp, _NO_LIMIT)


def simplex(case: Case, limit_s: float) -> Floats:
    """HiGHS' dual simplex, twice: least batch time, then least freezing."""
    return lp_simplex.solve_by_simplex(case.lp, _NO_LIMIT)


def highs(**options: object) -> Way:
    """HiGHS with other options, once: batch time plus a small overhead on freezing."""

    def solve(case: Case, limit_s: float) -> Floats:
        return _weighted(case.lp, case, **options)[case.lp.n_actions + 1 :]

    return solve


def implied_kept(case: Case, limit_s: float) -> Floats:
    """The dual simplex, with the rows of edges that follow from others."""
    lp, edges = case.lp, case.dag.edges
    ranks = case.dag.ranks
    implied = (ranks[edges[:, 0]] == ranks[edges[:, 1]]) & (edges[:, 1] - edges[:, 0] != 1)
    before, after = edges[implied].T
    longest = case.bounds.max_ms[before] / lp.scale_ms
    saved = longest - case.bounds.min_ms[before] / lp.scale_ms
    ratio = np.zeros(lp.n_actions, dtype=np.int64)
    ratio[lp.freezable] = np.arange(len(lp.freezable))
    rows = [
        ([j, i, lp.n_actions + 1 + ratio[i]] if s else [j, i], [1.0, -1.0, s] if s else [1.0, -1.0])
        for i, j, s in zip(before.tolist(), after.tolist(), saved.tolist(), strict=True)
    ]
    longer = replace(
        lp,
        row_start=np.append(
            lp.row_start, lp.row_start[-1] + np.cumsum([len(c) for c, _ in rows])
        ).astype(np.int32),
        columns=np.append(lp.columns, np.concatenate([c for c, _ in rows])).astype(np.int32),
        values=np.append(lp.values, np.concatenate([v for _, v in rows])),
        row_lower=np.append(lp.row_lower, longest),
        row_upper=np.append(lp.row_upper, np.full(len(rows), np.inf)),
    )
    return lp_simplex.solve_by_simplex(longer, _NO_LIMIT)


def contracted(case: Case, limit_s: float) -> Floats:
    """The dual simplex after joining each action to the only one that it waits for."""
    lp = case.lp
    entries = [
        dict(zip(lp.columns[a:b].tolist(), lp.values[a:b].tolist(), strict=True))
        for a, b in zip(lp.row_start[:-1], lp.row_start[1:], strict=True)
    ]
    lower = lp.row_lower.copy()
    into, out = defaultdict(list), defaultdict(list)
    for e in range(lp.n_precedence):
        for column, value in entries[e].items():
            if column < lp.n_actions:
                (into if value > 0.0 else out)[column].append(e)
    gone = set()
    for node in case.dag.topological.tolist():
        if len(into[node]) != 1:
            continue
        (only,) = into[node]
        before = dict(entries[only])
        del before[node]  # P_node = least - (what is left of the row)
        for e in out[node]:
            entries[e].pop(node)
            for column, value in before.items():
                entries[e][column] = entries[e].get(column, 0.0) + value
            lower[e] += lower[only]
        source = min(before, key=before.__getitem__)  # the one with -1
        out[source] = [e for e in out[source] if e != only] + out[node]
        gone.add(only)
    stay = [e for e in range(len(entries)) if e not in gone]
    smaller = replace(
        lp,
        row_start=np.cumsum([0, *(len(entries[e]) for e in stay)]).astype(np.int32),
        columns=np.concatenate([list(entries[e]) for e in stay]).astype(np.int32),
        values=np.concatenate([list(entries[e].values()) for e in stay]),
        row_lower=lower[stay],
        row_upper=lp.row_upper[stay],
    )
    return lp_simplex.solve_by_simplex(smaller, _NO_LIMIT)


def paths(case: Case, limit_s: float) -> Floats:
    """Cutting planes: P_d and ratios alone, and a row for each longest path that turns up."""
    lp, dag, until = case.lp, case.dag, time.process_time() + 0.9 * limit_s
    n_ratios, scale = len(lp.freezable), lp.scale_ms
    ratio = np.full(lp.n_actions, -1)
    ratio[lp.freezable] = np.arange(n_ratios)
    longest = case.bounds.max_ms / scale
    saved = longest - case.bounds.min_ms / scale
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    for upper in lp.column_upper[lp.n_actions + 1 :].tolist():
        solver.addVar(0.0, upper)
    solver.addVar(0.0, highspy.kHighsInf)
    solver.changeColCost(n_ratios, 1.0)
    for stage, cap in enumerate(lp.caps.tolist()):
        members = np.flatnonzero(dag.stages[lp.freezable] == stage).astype(np.int32)
        solver.addRow(-highspy.kHighsInf, cap, len(members), members, np.ones(len(members)))
    rng = np.random.default_rng(0)
    ratios = best = np.zeros(n_ratios)
    end, bound = np.inf, 0.0
    while end > bound * 1.001 and time.process_time() < until:
        durations = longest.copy()
        durations[lp.freezable] -= ratios * saved[lp.freezable]
        if makespan(dag, durations) < end:
            end, best = makespan(dag, durations), ratios
        for _ in range(20):  # noise turns up other paths of nearly the same length
            noisy = durations * rng.uniform(0.99, 1.01, len(durations))
            path = np.array([dag.index[action] for action in critical_path(dag, noisy)])
            free = path[ratio[path] >= 0]
            solver.addRow(
                float(longest[path].sum()),
                highspy.kHighsInf,
                len(free) + 1,
                np.append(ratio[free], n_ratios).astype(np.int32),
                np.append(saved[free], 1.0),
            )
        solver.run()
        bound = solver.getInfo().objective_function_value
        ratios = np.clip(np.array(solver.getSolution().col_value)[:n_ratios], 0.0, 1.0)
    return best


def tied(case: Case, limit_s: float) -> Floats:
    """One ratio for all microbatches of a stage's steady state."""
    lp, dag = case.lp, case.dag
    group: dict[object, int] = {}
    column = np.arange(len(lp.column_lower))
    for i, node in enumerate(lp.freezable.tolist()):
        action = dag.actions[node]
        steady = case.n_ranks <= action.microbatch < case.n_microbatches - case.n_ranks
        key = (action.stage, action.kind, -1 if steady else action.microbatch)
        column[lp.n_actions + 1 + i] = lp.n_actions + 1 + group.setdefault(key, len(group))
    n_columns = lp.n_actions + 1 + len(group)
    row_of = np.repeat(np.arange(len(lp.row_lower)), np.diff(lp.row_start))
    keys, slot = np.unique(row_of * n_columns + column[lp.columns], return_inverse=True)
    smaller = replace(
        lp,
        row_start=np.searchsorted(keys, n_columns * np.arange(len(lp.row_lower) + 1)).astype(
            np.int32
        ),
        columns=(keys % n_columns).astype(np.int32),
        values=np.bincount(slot, lp.values),
        column_lower=np.zeros(n_columns),
        column_upper=np.append(np.full(lp.n_actions + 1, np.inf), np.ones(len(group))),
    )
    found = _weighted(smaller, case)
    return found[column[lp.n_actions + 1 :]]


def extrapolated(case: Case, limit_s: float) -> Floats:
    """The plan for half the microbatches; in between, the mean of its middle; budgets kept."""
    lp, dag = case.lp, case.dag
    few = max(case.n_microbatches // 2, case.n_ranks)
    half, shift = few // 2, case.n_microbatches - few
    small_dag = schedule_dag(case.schedule, case.n_ranks, few)
    in_long = [
        dag.index[replace(a, microbatch=a.microbatch + shift * (a.microbatch >= half))]
        for a in small_dag.actions
    ]
    bounds = DurationBounds(case.bounds.min_ms[in_long], case.bounds.max_ms[in_long])
    n_freezable = np.bincount(dag.stages[lp.freezable], minlength=dag.n_stages)
    small = build_lp(small_dag, bounds, (lp.caps / n_freezable).tolist())
    found = lp_simplex.solve_by_simplex(small, _NO_LIMIT)
    planned = dict(zip((small_dag.actions[i] for i in small.freezable), found, strict=True))
    middle = range(few // 4, few - few // 4)
    ratios = np.zeros(len(lp.freezable))
    for i, node in enumerate(lp.freezable.tolist()):
        action = dag.actions[node]
        m = action.microbatch
        near = [m] if m < few // 4 else [m - shift] if m - shift >= few - few // 4 else middle
        ratios[i] = np.mean([planned[replace(action, microbatch=n)] for n in near])
    used = np.bincount(dag.stages[lp.freezable], ratios, dag.n_stages)
    return ratios * np.minimum(1.0, lp.caps / np.maximum(used, 1e-9))[dag.stages[lp.freezable]]


WAYS: dict[str, Way] = {
    "inside": inside,
    "simplex": simplex,
    "simplex, implied edges kept": implied_kept,
    "simplex, chains contracted": contracted,
    "simplex, one weighted solve": highs(),
    "simplex, primal": highs(simplex_strategy=4),
    "simplex, no presolve": highs(presolve="off"),
    "IPX": highs(solver="ipx", run_crossover="off"),
    "IPX, crossover": highs(solver="ipx", run_crossover="on"),
    "PDLP": highs(solver="pdlp", kkt_tolerance=1e-6),
    "HiPDLP": highs(solver="hipdlp", kkt_tolerance=1e-6),
    "paths as cutting planes": paths,
    "steady state tied": tied,
    "fewer microbatches": extrapolated,
}


def _weighted(lp: FreezeLp, case: Case, **options: object) -> Floats:
    solver = lp_simplex.load(lp, _NO_LIMIT)
    for option, value in options.items():
        solver.setOptionValue(option, value)
    cost = np.zeros(len(lp.column_lower))
    cost[lp.n_actions] = 1.0
    overhead = FREEZING_PRICE * makespan(case.dag, case.bounds.max_ms) / lp.scale_ms
    # A tied column stands for many ratios; the budgets know how many.
    budgets = slice(lp.row_start[lp.n_precedence], lp.row_start[lp.n_precedence + lp.n_stages])
    np.add.at(cost, lp.columns[budgets], lp.values[budgets] * overhead / lp.caps.sum())
    solver.changeColsCost(len(cost), np.arange(len(cost), dtype=np.int32), cost)
    solver.run()
    status = solver.modelStatusToString(solver.getModelStatus())
    if status != "Optimal":
        raise RuntimeError(status)
    return np.array(solver.getSolution().col_value)


def _attempt(name: str, case: Case, limit_s: float, answer: Connection) -> None:
    spent = int(time.process_time() + limit_s)
    resource.setrlimit(resource.RLIMIT_CPU, (spent, spent))
    started = time.process_time()
    try:
        ratios = WAYS[name](case, limit_s)
    except RuntimeError as error:
        answer.send(getattr(error, "status", str(error)))
        return
    seconds = time.process_time() - started
    answer.send((seconds, case.batch_ms(ratios), float(ratios.mean())))


def main(arguments: Sequence[str]) -> int:
    """Try the chosen ways, one after another, print a row for each, and return the status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--noise", type=float, default=0.05)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each way")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    options = parser.parse_args(arguments)
    return status_of(lambda: _try(options))


def _try(options: argparse.Namespace) -> int:
    """Do what the options ask for.

    Raises:
        ValueError: If one of them is wrong.
    """
    require("--limit", options.limit, 0.0, 1e6, above=True)
    # More noise than this would make durations negative.
    require("--noise", options.noise, 0.0, 0.2)
    names = "--schedule, --ranks, --microbatches"
    require_pipeline(options.schedule, options.ranks, options.microbatches, names)
    case = make_case(options.schedule, options.ranks, options.microbatches, noise=options.noise)
    bound_ms = solve_certified(case.lp, _NO_LIMIT).bound * case.lp.scale_ms
    titles = ["way", "seconds", "above the lower bound", "mean freeze ratio"]
    for line in markdown_lines(titles, _rows(options, case, bound_ms)):
        print(line, flush=True)
    return 0


def _rows(options: argparse.Namespace, case: Case, bound_ms: float) -> Iterator[list[str]]:
    """Yield what came of each way, as soon as it ended."""
    for name in options.ways:
        here, there = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.Process(target=_attempt, args=(name, case, options.limit, there))
        process.start()
        process.join()
        answer = here.recv() if here.poll() else f"ended at {options.limit:.0f} s"
        if isinstance(answer, str):
            yield [name, "-", answer, ""]
        else:
            seconds, batch_ms, mean = answer
            above = f"{batch_ms / bound_ms - 1.0:+.4%}"
            yield [name, f"{seconds:.2f}", above, f"{mean:.4f}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
