"""The program solved to a vertex by HiGHS' simplex method: exact, and fast for small pipelines."""

from __future__ import annotations

import highspy
import numpy as np
from numpy.typing import NDArray

from timelyfreeze.planning.program import FreezeLp, LpError, variance_odds

# HiGHS's own feasibility and optimality tolerances, in units of the longest action (see build_lp).
# Its default of 1e-7 would let a path of a few hundred actions be wrong in the fifth digit.
_SOLVER_TOLERANCE = 1e-9
# How far P_d may exceed its optimum, relatively, while freezing is minimised. None is needed in
# exact arithmetic. Where durations span many decades, rounding can make the solver doubt its own
# optimum (these two statuses); it then gets a little room, instead of the run getting no plan.
_BATCH_TIME_SLACKS = (0.0, 1e-9, 1e-7)
# Pieces of a ratio's convex cost. At a cap of 0.5 a sixteenth is 0.03.
_N_SEGMENTS = 16
_ROUNDING_STATUSES = (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnknown)


def solve_by_simplex(lp: FreezeLp, time_limit_s: float) -> NDArray[np.float64]:
    """Minimise P_d, then the freezing at that P_d; return the R ratios.

    The second goal is the sum of ratios, or of their ``variance_odds`` where the program spreads.
    """
    n_columns = len(lp.column_lower)
    solver = load(lp, time_limit_s)
    cost = np.zeros(n_columns)
    cost[lp.n_actions] = 1.0
    minimise(solver, lp, cost, "least batch time")

    # P_d is held at the value just found: the first solution is feasible for the second program,
    # which starts from its basis.
    best = float(solver.getInfo().objective_function_value)
    cost[lp.n_actions] = 0.0
    if lp.spreads:
        cost = _add_segments(solver, lp)
    else:
        cost[lp.n_actions + 1 :] = 1.0
    for slack in _BATCH_TIME_SLACKS:
        solver.changeColBounds(lp.n_actions, 0.0, best * (1.0 + slack))
        try:
            minimise(solver, lp, cost, "least freezing")
            break
        except LpError:
            retry = solver.getModelStatus() in _ROUNDING_STATUSES
            if not retry or slack == _BATCH_TIME_SLACKS[-1]:
                raise
    solution = np.array(solver.getSolution().col_value, dtype=np.float64)
    return solution[lp.n_actions + 1 : n_columns]


def _add_segments(solver: highspy.Highs, lp: FreezeLp) -> NDArray[np.float64]:
    """Cut each ratio into segments whose cost rises, and return the cost of all columns.

    r_i is the sum of its segments. Their slopes are those of ``variance_odds``, a convex function,
    so segments fill up in their order by themselves and the program stays linear.
    """
    first = lp.n_actions + 1
    upper = lp.column_upper[first:]
    ends = np.linspace(0.0, 1.0, _N_SEGMENTS + 1) * upper[:, np.newaxis]
    widths = np.diff(ends, axis=1)
    rises = np.diff(variance_odds(ends), axis=1)
    slopes = np.divide(rises, widths, out=np.ones_like(rises), where=widths > 0.0)
    n_columns, n_new = len(lp.column_upper), widths.size
    nothing = np.zeros(0, dtype=np.int32)
    solver.addCols(
        n_new, slopes.ravel(), np.zeros(n_new), widths.ravel(), 0, nothing, nothing, np.zeros(0)
    )
    for k in range(len(upper)):
        segments = n_columns + k * _N_SEGMENTS + np.arange(_N_SEGMENTS)
        columns = np.concatenate([[first + k], segments]).astype(np.int32)
        values = np.concatenate([[1.0], -np.ones(_N_SEGMENTS)])
        solver.addRow(0.0, 0.0, len(columns), columns, values)
    return np.concatenate([np.zeros(n_columns), slopes.ravel()])


def load(lp: FreezeLp, time_limit_s: float) -> highspy.Highs:
    """Hand the program to a new solver, without a cost yet."""
    solver = highspy.Highs()
    for option, value in {
        "output_flag": False,
        "threads": 1,
        "time_limit": time_limit_s,
        "primal_feasibility_tolerance": _SOLVER_TOLERANCE,
        "dual_feasibility_tolerance": _SOLVER_TOLERANCE,
    }.items():
        solver.setOptionValue(option, value)
    model = highspy.HighsLp()
    model.num_col_ = len(lp.column_lower)
    model.num_row_ = len(lp.row_lower)
    model.col_cost_ = np.zeros(len(lp.column_lower))
    model.col_lower_, model.col_upper_ = lp.column_lower, lp.column_upper
    model.row_lower_, model.row_upper_ = lp.row_lower, lp.row_upper
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = lp.row_start
    model.a_matrix_.index_ = lp.columns
    model.a_matrix_.value_ = lp.values
    solver.passModel(model)
    return solver


def minimise(solver: highspy.Highs, lp: FreezeLp, cost: NDArray[np.float64], goal: str) -> None:
    """Minimise a cost of the columns; ``goal`` says in errors what it stands for.

    Raises:
        LpError: If the solver stops short of an optimum.
    """
    solver.changeColsCost(len(cost), np.arange(len(cost), dtype=np.int32), cost)
    solver.run()
    model_status = solver.getModelStatus()
    if model_status != highspy.HighsModelStatus.kOptimal:
        status = str(solver.modelStatusToString(model_status))
        raise LpError(
            f"the freeze-ratio program ({goal}) ended with status {status!r} instead of an "
            f"optimum; it has A={lp.n_actions} actions, E={lp.n_edges} edges, S={lp.n_stages} "
            "stages",
            status=status,
        )
