"""Where skipped input gradients pay: a program with a variable for each backward that may be idle.

Eq. 6 of arXiv:2602.05754 is given y_sm for every microbatch m and every stage s but the first: 1 if
stages 0 to s are frozen whole for m (``skipped_grads``), so that what is left of the backward at s,
its input gradient, is skipped too. With

    w_i = w_i^max - r_i (w_i^max - w_i^min) - y_i w_i^min,   y_sm <= r_sm,   y_sm <= y_(s-1)m,

and r_0m in place of y_0m it stays linear. A fraction of y would be a probability, and gradients
would be skipped in some batches only, so y, and r in the first stage, are whole numbers: HiGHS
branches.
With the skip depths it finds, what remains is a program of the usual form. Notation: A actions, R
freezable ones, S stages.
"""

from __future__ import annotations

from dataclasses import replace

import highspy
import numpy as np
from numpy.typing import NDArray

from timelyfreeze.planning.program import FreezeLp
from timelyfreeze.planning.simplex import load
from timelyfreeze.planning.skipped_grads import idle_ms
from timelyfreeze.schedule import ActionKind, PipelineDag
from timelyfreeze.timing import DurationBounds

Floats = NDArray[np.float64]

# No plan needs the last thousandth: bounds are not measured that well.
_RELATIVE_GAP = 1e-3
# Branching takes a few seconds for 4 ranks and 8 microbatches. What is found by then counts.
_LONGEST_SEARCH_S = 20.0


def choose_skip_depths(
    lp: FreezeLp, dag: PipelineDag, bounds: DurationBounds, time_limit_s: float
) -> dict[int, int]:
    """Return the skip depths, 1 or more, that make the batch end soonest, by microbatch.

    Freezing these stages whole keeps every stage's budget. Empty if none was found in time.

    Args:
        lp: The program without skipped gradients.
        dag: Precedence graph of A actions.
        bounds: Bounds that ``lp`` was built from.
        time_limit_s: Limit on the solver's time, seconds.
    """
    pairs = _pairs(lp, dag)
    if not pairs:
        return {}
    program = _with_skips(lp, dag, bounds, pairs)
    first = [
        (lp.n_actions + 1 + k, dag.actions[i].microbatch)
        for k, i in enumerate(lp.freezable.tolist())
        if dag.stages[i] == 0
    ]
    solver = load(program, min(time_limit_s, _LONGEST_SEARCH_S))
    solver.setOptionValue("mip_rel_gap", _RELATIVE_GAP)
    n_columns = len(program.column_lower)
    solver.changeColCost(lp.n_actions, 1.0)
    whole = [column for column, _ in first] + list(range(n_columns - len(pairs), n_columns))
    solver.changeColsIntegrality(
        len(whole), np.array(whole, dtype=np.int32), [highspy.HighsVarType.kInteger] * len(whole)
    )
    solver.run()
    if solver.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return {}
    solution = solver.getSolution().col_value
    depths = {microbatch: 1 for column, microbatch in first if solution[column] > 0.5}
    for (stage, microbatch), y in zip(pairs, solution[n_columns - len(pairs) :], strict=True):
        if y > 0.5:
            depths[microbatch] = max(depths[microbatch], stage + 1)
    return depths


def _pairs(lp: FreezeLp, dag: PipelineDag) -> list[tuple[int, int]]:
    """Return the stages and microbatches whose gradients can be skipped; not the first stage."""
    can_freeze = lp.column_upper[lp.n_actions + 1 :] > 0.0
    free = {
        (dag.actions[i].stage, dag.actions[i].microbatch) for i in lp.freezable[can_freeze].tolist()
    }
    return sorted(
        (stage, microbatch)
        for stage, microbatch in free
        if stage > 0 and all((earlier, microbatch) in free for earlier in range(stage))
    )


def _with_skips(
    lp: FreezeLp, dag: PipelineDag, bounds: DurationBounds, pairs: list[tuple[int, int]]
) -> FreezeLp:
    """Return the program with a column y for each of ``pairs`` behind its ratios."""
    n_before = len(lp.column_lower)
    column = {pair: n_before + k for k, pair in enumerate(pairs)}
    ratio_column = {
        (dag.actions[i].stage, dag.actions[i].microbatch): lp.n_actions + 1 + k
        for k, i in enumerate(lp.freezable.tolist())
    }
    saved = (bounds.min_ms - idle_ms(dag, bounds)) / lp.scale_ms

    rows = np.repeat(np.arange(len(lp.row_lower)), np.diff(lp.row_start))
    parts = [(rows, lp.columns.astype(np.int64), lp.values)]
    starts_row = (rows < lp.n_precedence) & (lp.columns < lp.n_actions) & (lp.values < 0.0)
    has_work_row = len(lp.row_lower) > lp.n_precedence + lp.n_stages
    extra: list[tuple[int, int, float]] = []
    for row, i in zip(rows[starts_row].tolist(), lp.columns[starts_row].tolist(), strict=True):
        y = _column_of(dag, i, column)
        if y is not None:
            extra.append((row, y, float(saved[i])))
    if has_work_row:
        for i in range(lp.n_actions):
            y = _column_of(dag, i, column)
            if y is not None:
                extra.append((len(lp.row_lower) - 1, y, float(saved[i])))
    n_rows = len(lp.row_lower)
    for (stage, microbatch), y in column.items():
        ahead = column.get((stage - 1, microbatch), ratio_column[0, microbatch])
        for limit in (ratio_column[stage, microbatch], ahead):
            extra += [(n_rows, limit, 1.0), (n_rows, y, -1.0)]
            n_rows += 1
    parts.append(tuple(np.array(part) for part in zip(*extra, strict=True)))  # type: ignore[arg-type]

    rows, columns, values = (np.concatenate(part) for part in zip(*parts, strict=True))
    by_row = np.argsort(rows, kind="stable")
    row_start = np.zeros(n_rows + 1, dtype=np.int32)
    np.cumsum(np.bincount(rows, minlength=n_rows), out=row_start[1:])
    n_new = n_rows - len(lp.row_lower)
    return replace(
        lp,
        row_start=row_start,
        columns=columns[by_row].astype(np.int32),
        values=values[by_row],
        row_lower=np.concatenate([lp.row_lower, np.zeros(n_new)]),
        row_upper=np.concatenate([lp.row_upper, np.full(n_new, np.inf)]),
        column_lower=np.concatenate([lp.column_lower, np.zeros(len(pairs))]),
        column_upper=np.concatenate([lp.column_upper, np.ones(len(pairs))]),
    )


def _column_of(dag: PipelineDag, i: int, column: dict[tuple[int, int], int]) -> int | None:
    action = dag.actions[i]
    if action.kind is ActionKind.FORWARD:
        return None
    return column.get((action.stage, action.microbatch))
